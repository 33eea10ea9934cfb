//! Parameters of stores whose tables have places of one size for keys and their values.

use crate::hash_slots::{Placement, Spec};
use crate::system::{Footprint, Sizing, SizingError};
use farside_remote::service::Plan;
use serde::{Deserialize, Serialize};

/// Length of a key and its value together for which a store is created by default.
const PAIR_DEFAULT: u32 = 256;
/// Smallest length of the longest key.
const KEY_LEN: usize = 32;

/// Description of a table with places of one size.
pub(super) trait Places: Spec + Serialize {
    /// Largest length of a key and its value together, in bytes.
    const PAIR_MAX: usize;

    /// Describes a table for this number of items, or `None` if there is none.
    fn of(items: u64, pair: u32, seed: u64, placement: Placement) -> Option<Self>;

    /// Number of places for keys in the buckets to which the hash maps them.
    fn places(&self) -> u64;
}

/// Plans a store of this kind: as [`farside_remote::service::Kind::plan`].
///
/// # Errors
/// The parameters are not valid for a store of this kind, or there is no such table.
pub(super) fn plan<P: Places>(
    parameters: &str,
    kind: &str,
    quota: u64,
    entropy: u64,
) -> Result<Plan, String> {
    let new = NewStore::parse(parameters, kind, P::PAIR_MAX)?;
    let spec = new.table(quota, |items| P::of(items, new.pair(), entropy, new.placement))?;
    let table_len = spec.table_len().expect("it was checked");
    let parameters = serde_json::to_string(&spec).map_err(|error| error.to_string())?;
    Ok(Plan { table_len, parameters, wide: false })
}

/// Size of a store: as [`crate::system::System::footprint`].
///
/// # Errors
/// There is no such table.
pub(super) fn footprint<P: Places>(sizing: &Sizing) -> Result<Footprint, SizingError> {
    let pair = NewStore::of(sizing).pair();
    if pair as usize > P::PAIR_MAX {
        return Err(SizingError::Value(P::PAIR_MAX - sizing.key_len.clamp(KEY_LEN, P::PAIR_MAX)));
    }
    let spec = P::of(sizing.items.unwrap_or(1), pair, 0, Placement::Hashed).ok_or(SizingError::Items)?;
    let table_bytes = spec.table_len().ok_or(SizingError::Items)?;
    Ok(Footprint { slots: spec.places(), table_bytes, item_bytes: 0 })
}

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
    fn parse(parameters: &str, kind: &str, pair_max: usize) -> Result<NewStore, String> {
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

    fn pair(&self) -> u32 {
        self.pair.unwrap_or(PAIR_DEFAULT)
    }

    /// Returns the description of a table for the number of items that was asked for, or else for the most that fit
    /// into `quota` bytes. `of` describes a table for a number of items.
    ///
    /// # Errors
    /// There is no such table.
    fn table<S: Spec>(&self, quota: u64, of: impl Fn(u64) -> Option<S>) -> Result<S, String> {
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
