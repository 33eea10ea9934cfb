//! Tables of a power of two of slots: how the catalog describes them, and how keys find their first slot.
//!
//! Invariant: what a stored table was filled by never changes.

use farside_remote::service::Extent;
use rapidhash::v3::{RapidSecrets, rapidhash_v3_seeded};
use serde::de::DeserializeOwned;
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

/// What a store is asked for, as JSON.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Request {
    /// Items that the table is to have room for; from the quota if absent.
    pub(crate) items: Option<u64>,
    /// See [`Placement`].
    pub(crate) placement: Placement,
}

impl Request {
    /// # Errors
    /// The parameters are none of a store of this kind.
    pub(crate) fn parse(parameters: &str, kind: &str) -> Result<Request, String> {
        serde_json::from_str(parameters).map_err(|error| {
            format!("a {kind} store takes {{\"items\": N, \"placement\": \"hashed\"|\"permuted\"}}: {error}")
        })
    }

    /// Items that the table has room for: half of those that the quota has, unless they were said.
    pub(crate) fn items(&self, quota: u64) -> u64 {
        /// Bytes of an item, if nobody says how many items there are.
        const ITEM_SIZE_ASSUMED: u64 = 512;
        self.items.unwrap_or(quota / ITEM_SIZE_ASSUMED / 2)
    }
}

/// What every client must know of a table, as JSON in the catalog.
pub trait Spec: DeserializeOwned {
    /// The number of slots, a power of two; what seeds the hash; and how keys are placed.
    fn slots(&self) -> (u64, u64, Placement);

    /// Bytes of a table of so many slots, if there can be one.
    fn table_len(slots: u64) -> Option<u64>;
}

/// A table, as a client that has the catalog's word for it sees it.
#[derive(Clone, Debug)]
pub struct Table<S> {
    /// What it is.
    pub spec: S,
    /// Where it is, and the key of the region.
    pub extent: Extent,
    secrets: RapidSecrets,
}

impl<S: Spec> Table<S> {
    /// The table that the catalog describes.
    ///
    /// # Errors
    /// The description makes no sense.
    pub fn new(parameters: &str, extent: Extent) -> Result<Table<S>, String> {
        let spec: S = serde_json::from_str(parameters)
            .map_err(|error| format!("the catalog's description of the table is no such: {error}"))?;
        let (slots, seed, _) = spec.slots();
        let fits = S::table_len(slots).is_some_and(|len| len <= extent.len);
        if !slots.is_power_of_two() || !fits || extent.at.checked_add(extent.len).is_none() {
            return Err(format!(
                "the catalog describes a table of {slots} slots in {} bytes at {:#x}",
                extent.len, extent.at
            ));
        }
        let secrets = RapidSecrets::seed(seed);
        Ok(Table { spec, extent, secrets })
    }

    /// The first slot of `key`.
    #[inline]
    pub(crate) fn first_slot(&self, key: &[u8]) -> u64 {
        let (slots, _, placement) = self.spec.slots();
        let mask = slots - 1;
        match (placement, <[u8; 8]>::try_from(key)) {
            // Multiplying by an odd number permutes the residues of a power of two, and spreads neighbours.
            (Placement::Permuted, Ok(number)) => {
                u64::from_be_bytes(number).wrapping_mul(0x9e37_79b9_7f4a_7c15) & mask
            }
            _ => rapidhash_v3_seeded(key, &self.secrets) & mask,
        }
    }
}
