//! Hash tables whose number of slots is a power of two: their description in the catalog, and the first slot of a key.
//!
//! Invariant: the function from keys to first slots never changes for a stored table.

use farside_remote::service::Extent;
use rapidhash::v3::{RapidSecrets, rapidhash_v3_seeded};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Function that maps each key of a table to the key's first slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// A seeded hash (rapidhash, version 3) of the key selects the first slot.
    #[default]
    Hashed,
    /// A permutation: a key of 8 bytes is a big-endian number below the number of slots and has its own slot. This is
    /// the collision-free layout of the paper's experiments. Other keys are hashed.
    Permuted,
}

/// Parameters of a new store, parsed from JSON.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Request {
    /// Number of items that the table must hold; if absent, derived from the quota.
    pub(crate) items: Option<u64>,
    /// Function that maps keys to first slots.
    pub(crate) placement: Placement,
}

impl Request {
    /// # Errors
    /// The parameters are not valid for a store of this kind.
    pub(crate) fn parse(parameters: &str, kind: &str) -> Result<Request, String> {
        serde_json::from_str(parameters).map_err(|error| {
            format!("a {kind} store takes {{\"items\": N, \"placement\": \"hashed\"|\"permuted\"}}: {error}")
        })
    }

    /// Number of items that the table must hold. The default is half of the items that fit into `quota` bytes.
    pub(crate) fn items(&self, quota: u64) -> u64 {
        self.items.unwrap_or_else(|| items_of(quota))
    }
}

/// Number of items of a table if it is not given: half of the items that fit into `quota` bytes.
pub(crate) fn items_of(quota: u64) -> u64 {
    /// Assumed bytes of an item.
    const ITEM_SIZE_ASSUMED: u64 = 512;
    quota / ITEM_SIZE_ASSUMED / 2
}

/// Description of a table, stored as JSON in the catalog.
pub trait Spec: DeserializeOwned {
    /// Returns the number of slots (a power of two), the seed of the hash, and the placement of keys.
    fn slots(&self) -> (u64, u64, Placement);

    /// Returns the bytes of the table, or `None` if there is no such table.
    fn table_len(&self) -> Option<u64>;
}

/// A table as the catalog describes it.
#[derive(Clone, Debug)]
pub struct Table<S> {
    /// Description of the table in the catalog.
    pub spec: S,
    /// Address, length and region key of the table.
    pub extent: Extent,
    secrets: RapidSecrets,
}

impl<S: Spec> Table<S> {
    /// Parses the catalog's description of a table.
    ///
    /// # Errors
    /// The description is invalid.
    pub fn new(parameters: &str, extent: Extent) -> Result<Table<S>, String> {
        let spec: S = serde_json::from_str(parameters)
            .map_err(|error| format!("invalid table description in the catalog: {error}"))?;
        let (slots, seed, _) = spec.slots();
        let fits = spec.table_len().is_some_and(|len| len <= extent.len);
        if !slots.is_power_of_two() || !fits || extent.at.checked_add(extent.len).is_none() {
            return Err(format!(
                "invalid table description in the catalog: {slots} slots in {} bytes at {:#x}",
                extent.len, extent.at
            ));
        }
        let secrets = RapidSecrets::seed(seed);
        Ok(Table { spec, extent, secrets })
    }

    /// Returns the index of the first slot of `key`.
    #[inline]
    pub(crate) fn first_slot(&self, key: &[u8]) -> u64 {
        let (slots, _, placement) = self.spec.slots();
        let mask = slots - 1;
        match (placement, <[u8; 8]>::try_from(key)) {
            // Multiplication by an odd number permutes the numbers below a power of two, so no keys collide. It also
            // places neighbouring keys far apart.
            (Placement::Permuted, Ok(number)) => {
                u64::from_be_bytes(number).wrapping_mul(0x9e37_79b9_7f4a_7c15) & mask
            }
            _ => rapidhash_v3_seeded(key, &self.secrets) & mask,
        }
    }
}
