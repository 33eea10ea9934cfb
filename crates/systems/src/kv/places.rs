//! Parameters of stores whose tables have places of one size for keys and their values.

use crate::hash_slots::{Placement, Spec};
use crate::system::Sizing;
use serde::{Deserialize, Serialize};

/// Length of a key and its value together for which a store is created by default.
pub(super) const PAIR_DEFAULT: u32 = 256;
/// Smallest length of the longest key.
pub(super) const KEY_LEN: usize = 32;

/// Parameters of a new store, as JSON.
#[derive(Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct NewStore {
    /// Number of items that the table must hold; if absent, as many as fit into the quota.
    pub(super) items: Option<u64>,
    /// Largest length of a key and its value together, in bytes.
    pub(super) pair: Option<u32>,
    pub(super) placement: Placement,
}

impl NewStore {
    /// Parameters of a store of this size.
    pub(super) fn of(sizing: &Sizing) -> NewStore {
        let Sizing { items, key_len, value_len, .. } = *sizing;
        let key_len = key_len.max(KEY_LEN);
        let pair = (value_len > 0).then_some(u32::try_from(key_len + value_len).unwrap_or(u32::MAX));
        let placement = if sizing.collision_free { Placement::Permuted } else { Placement::Hashed };
        NewStore { items, pair, placement }
    }

    /// # Errors
    /// The parameters are not valid for a store of this kind.
    pub(super) fn parse(parameters: &str, kind: &str, pair_max: usize) -> Result<NewStore, String> {
        let new: NewStore = serde_json::from_str(parameters).map_err(|error| {
            format!(
                "a {kind} store takes {{\"items\": N, \"pair\": BYTES, \"placement\": \"hashed\"|\"permuted\"}}: \
                 {error}"
            )
        })?;
        let pair = new.pair();
        if (1..=pair_max).contains(&(pair as usize)) {
            return Ok(new);
        }
        Err(format!(
            "keys and values of {pair} bytes together are not possible in a {kind} store: give at most {pair_max}, or \
             use a pilaf store"
        ))
    }

    pub(super) fn pair(&self) -> u32 {
        self.pair.unwrap_or(PAIR_DEFAULT)
    }

    /// Returns the description of a table for the number of items that was asked for, or else for the most that fit
    /// into `quota` bytes. `of` describes a table for a number of items.
    ///
    /// # Errors
    /// There is no such table.
    pub(super) fn table<S: Spec>(&self, quota: u64, of: impl Fn(u64) -> Option<S>) -> Result<S, String> {
        let fits = |items| of(items).and_then(|spec| spec.table_len()).is_some_and(|len| len <= quota);
        let items = self.items.unwrap_or_else(|| {
            let (mut fit, mut too_many) = (1, quota.max(2));
            while too_many - fit > 1 {
                let middle = fit.midpoint(too_many);
                if fits(middle) { fit = middle } else { too_many = middle }
            }
            fit
        });
        let table = of(items).filter(|spec| spec.table_len().is_some());
        table.ok_or_else(|| format!("{items} items are too many for one store: give fewer --items"))
    }

    pub(super) fn encoded(&self) -> String {
        serde_json::to_string(self).expect("plain data")
    }
}
