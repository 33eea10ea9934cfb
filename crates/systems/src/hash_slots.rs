//! How keys find their first slot in a table of a power of two of slots.
//!
//! Invariant: what a stored table was filled by never changes.

use rapidhash::v3::{RapidSecrets, rapidhash_v3_seeded};
use serde::{Deserialize, Serialize};

/// How keys find their first slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// By a seeded hash (rapidhash, version 3).
    #[default]
    Hashed,
    /// Keys of 8 bytes are big-endian numbers below the number of slots, each with a slot of its own: the
    /// collision-free layout of the paper's runs. Other keys are hashed.
    Permuted,
}

/// The first slot of `key` in a table of `slots`, a power of two, whose seed made these secrets.
#[inline]
pub(crate) fn first_slot(placement: Placement, secrets: &RapidSecrets, slots: u64, key: &[u8]) -> u64 {
    let mask = slots - 1;
    match (placement, <[u8; 8]>::try_from(key)) {
        // Multiplying by an odd number permutes the residues of a power of two, and spreads neighbours.
        (Placement::Permuted, Ok(number)) => {
            u64::from_be_bytes(number).wrapping_mul(0x9e37_79b9_7f4a_7c15) & mask
        }
        _ => rapidhash_v3_seeded(key, secrets) & mask,
    }
}
