//! The catalog: the node's stores, and the segments granted to each.
//!
//! Invariant: clients learn of a store's region only after all its segments are granted. Before the node frees any
//! segment of a region, the region is no longer in the catalog and its key is revoked.

use crate::log::pairing::Paired;
use crate::rebuild::{self, Rebuild};
use crate::reuse::Reuse;
use crate::served::Served;
use farside_remote::Memory;
use farside_remote::arena::class::Class;
use farside_remote::arena::{REGIONS_MAX, SEGMENT_SIZE};
use farside_remote::control::{Register, Store, StoreStat};
use farside_remote::service::{Kind, Service};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Maximum length of a store's name, in bytes.
pub const NAME_MAX: usize = 64;

/// A store, and the node's own state of that store. The node's memory records only `store`, `fenced`, `register`
/// and `paired`: a node that takes over derives the service, the segments and a rebuild from them and from the memory,
/// and starts the rest anew.
pub struct Entry<M: Memory> {
    /// The description of the store that clients receive.
    pub store: Store,
    /// Service of the store.
    pub served: Arc<Served<M>>,
    /// All segments granted to the store, for its tables, its buffers and its reserve.
    pub segments: Vec<u32>,
    /// Whether sessions reuse the buffers that they retire in the store.
    pub(crate) reuse: Reuse,
    /// The rebuild of the store's table, if one is in progress.
    pub rebuild: Option<Rebuild>,
    /// Whether the store's service has found the table crowded.
    pub is_crowded: bool,
    /// Number of free segments below which no rebuild is started, set after a rebuild failed for lack of memory.
    pub(crate) segments_needed: u32,
    /// Nonces of the clients that were fenced for this store. They are in the node's memory, too.
    pub(crate) fenced: BTreeSet<u64>,
    /// The member's part of the register that decides on the store's next configuration. It is in the node's memory,
    /// too.
    pub(crate) register: Register,
    /// The memory's relation to the store's log. It is in the node's memory, too.
    pub(crate) paired: Option<Paired>,
    /// Number of completed scans. It is not in the node's memory, so another node that takes over starts at zero.
    pub(crate) scans: u64,
    /// Number of ended sessions of which the store's service was told.
    pub(crate) told: u64,
    /// Generation and cursor of the checkpoint of the store's log that is in progress.
    pub(crate) checkpoint: Option<(u64, u64)>,
    /// Generation of that checkpoint, while a step for it is in progress.
    pub(crate) collecting: Option<u64>,
    /// Reason why the store is not served until the node is started again, if it is not.
    pub(crate) refused: Option<String>,
}

impl<M: Memory> Entry<M> {
    /// The memory's relation to the store's log, if it has had one.
    pub fn paired(&self) -> Option<&Paired> {
        self.paired.as_ref()
    }

    /// Whether all segments of the store are parts of its table, and no rebuild changes that.
    pub(crate) fn is_table_only(&self) -> bool {
        self.rebuild.is_none() && self.segments.len() as u64 * SEGMENT_SIZE == self.store.table_len
    }

    /// Creates an entry without a rebuild.
    pub(crate) fn new(store: Store, service: Box<dyn Service<M>>, segments: Vec<u32>) -> Entry<M> {
        let served = Served::new(&store, service);
        Entry {
            store,
            served,
            segments,
            reuse: Reuse::default(),
            rebuild: None,
            is_crowded: false,
            segments_needed: 0,
            fenced: BTreeSet::new(),
            register: Register::default(),
            paired: None,
            scans: 0,
            told: 0,
            checkpoint: None,
            collecting: None,
            refused: None,
        }
    }
}

/// The stores of a node, by name.
pub struct Catalog<M: Memory> {
    kinds: Vec<Box<dyn Kind<M>>>,
    stores: BTreeMap<String, Entry<M>>,
    /// Regions and names of stores that are being created or dropped.
    busy: Vec<(u32, String)>,
    /// Number of stores with a table of leases.
    leased: usize,
}

/// Checks a store's name.
///
/// # Errors
/// The name is not allowed.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.len() > NAME_MAX || !name.chars().all(plain) {
        return Err(format!(
            "invalid store name '{}': use 1 to {NAME_MAX} letters, digits, '-', '_' or '.'",
            name.escape_debug()
        ));
    }
    Ok(())
}

/// Division of a store's segments by purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Division {
    /// Number of adjacent segments for the table.
    pub table: u32,
    /// Number of segments for buffers, within the quota.
    pub buffers: u32,
    /// Number of segments in the reserve, beyond the quota, so that a full store can be emptied.
    pub reserve: u32,
}

impl Division {
    /// Divides a quota, given the size of the table, both in bytes.
    ///
    /// # Errors
    /// The quota does not have space for the table and one segment of buffers.
    pub fn of(quota: u64, table_len: u64) -> Result<Division, String> {
        let quota_segments = quota / SEGMENT_SIZE;
        let table = table_len.div_ceil(SEGMENT_SIZE);
        if quota_segments <= table {
            return Err(format!(
                "a quota of {} MiB is too small for a table of {table} MiB and any item: give at least {} MiB, or \
                 fewer --items",
                quota_segments,
                table * 2
            ));
        }
        let buffers = quota_segments - table;
        let reserve = Division::reserve_of(buffers);
        let small = |n: u64| {
            u32::try_from(n).map_err(|_| format!("a quota of {quota} bytes is too large: give less"))
        };
        small(quota_segments + reserve)?;
        Ok(Division { table: small(table)?, buffers: small(buffers)?, reserve: small(reserve)? })
    }

    /// The division for a store that lies in its table alone, given its quota and the size of its table, both in bytes.
    ///
    /// # Errors
    /// The quota does not have space for the table.
    pub fn of_table(quota: u64, table_len: u64) -> Result<Division, String> {
        let (quota_segments, table) = (quota / SEGMENT_SIZE, table_len.div_ceil(SEGMENT_SIZE).max(1));
        if quota_segments < table {
            return Err(format!(
                "a quota of {quota_segments} MiB is too small for a table of {table} MiB: give at least {table} MiB, \
                 or fewer --items"
            ));
        }
        let table =
            u32::try_from(table).map_err(|_| format!("a quota of {quota} bytes is too large: give less"))?;
        Ok(Division { table, buffers: 0, reserve: 0 })
    }

    /// Number of segments in the reserve of a store with `buffers` segments for buffers. The result grows with
    /// `buffers`, so the result for a whole quota is the maximum that a node adds to that quota.
    pub fn reserve_of(buffers: u64) -> u64 {
        (buffers / 64).clamp(1, 16)
    }

    /// Number of further buffers of `len` bytes for which a store has space that has buffers of this size alone,
    /// according to its statistics. Retired buffers do not count, nor does the reserve, which takes tombstones alone.
    pub fn buffers_left(stat: &StoreStat, len: usize) -> u64 {
        let per_segment = Class::for_len(len).map_or(0, |class| class.count.into());
        let segments = match stat.is_table_only() {
            true => 0,
            false => stat.quota_bytes.saturating_sub(stat.table_bytes) / SEGMENT_SIZE,
        };
        (segments * per_segment).saturating_sub(stat.live_buffers + stat.retired_buffers)
    }

    /// Returns the total number of segments.
    pub fn segments(&self) -> u32 {
        self.table + self.buffers + self.reserve
    }
}

impl<M: Memory> Catalog<M> {
    /// Creates an empty catalog that supports these kinds.
    pub fn new(kinds: Vec<Box<dyn Kind<M>>>) -> Catalog<M> {
        Catalog { kinds, stores: BTreeMap::new(), busy: Vec::new(), leased: 0 }
    }

    /// Returns the kind with this name.
    ///
    /// # Errors
    /// No kind has this name.
    pub fn kind(&self, name: &str) -> Result<&dyn Kind<M>, String> {
        self.kinds.iter().find(|kind| kind.name() == name).map(Box::as_ref).ok_or_else(|| {
            let known: Vec<&str> = self.kinds.iter().map(|kind| kind.name()).collect();
            format!("unknown kind of store '{name}': use one of {}", known.join(", "))
        })
    }

    /// Whether sessions may reuse the buffers that they retire in the store with this region.
    pub(crate) fn permits_reuse(&self, region: u32) -> bool {
        let entry = self.by_region(region);
        entry.is_some_and(|entry| {
            let is_permitted = self.kind(&entry.store.kind).is_ok_and(|kind| kind.permits_reuse());
            is_permitted && entry.served.leases().is_none() && entry.rebuild.is_none()
        })
    }

    /// Creates the service of a store, including its former tables.
    ///
    /// # Errors
    /// The store's kind is unknown, or its parameters are not those of a plan of its kind.
    pub(crate) fn serve(&self, store: &Store) -> Result<Box<dyn Service<M>>, String> {
        let mut service = self.kind(&store.kind)?.serve(&store.parameters, store.extent())?;
        match &store.formers()[..] {
            [] => Ok(service),
            formers => rebuild::of(&mut *service)?.succeed(formers),
        }
    }

    /// Returns the store with this name.
    ///
    /// # Errors
    /// No store has this name.
    pub fn get(&self, name: &str) -> Result<&Entry<M>, String> {
        self.stores.get(name).ok_or_else(|| match self.stores.is_empty() {
            true => {
                format!(
                    "there is no store '{name}', nor any other: create it with 'farside store create {name}'"
                )
            }
            false => {
                let names: Vec<&str> = self.stores.keys().map(String::as_str).collect();
                format!("there is no store '{name}': the node has {}", names.join(", "))
            }
        })
    }

    /// Returns the store with this name and id. Also checks the nonce of a client of this store.
    ///
    /// # Errors
    /// No store has this name and id, or the nonce is invalid.
    pub(crate) fn of_client(&self, name: &str, id: u64, nonce: u64) -> Result<&Entry<M>, String> {
        let entry = self.same(name, id)?;
        if nonce == 0 {
            return Err("0 is no client's nonce: draw a random number of 64 bits".into());
        }
        Ok(entry)
    }

    /// Returns the store with this name and id.
    ///
    /// # Errors
    /// No store has this name and id.
    pub(crate) fn same(&self, name: &str, id: u64) -> Result<&Entry<M>, String> {
        let entry = self.get(name)?;
        if entry.store.id != id {
            return Err(format!(
                "store '{name}' was replaced by a new store of the same name: open it again"
            ));
        }
        Ok(entry)
    }

    /// Whether any store has a table of leases.
    pub(crate) fn is_any_leased(&self) -> bool {
        self.leased > 0
    }

    /// Iterates over all stores, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = &Entry<M>> {
        self.stores.values()
    }

    /// Iterates over all stores, sorted by name, for changes.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Entry<M>> {
        self.stores.values_mut()
    }

    /// The store with this region, mutable.
    pub(crate) fn by_region_mut(&mut self, region: u32) -> Option<&mut Entry<M>> {
        self.stores.values_mut().find(|entry| entry.store.region == region)
    }

    /// The store with this region.
    pub fn by_region(&self, region: u32) -> Option<&Entry<M>> {
        self.stores.values().find(|entry| entry.store.region == region)
    }

    /// Reserves a region number for a new store.
    ///
    /// # Errors
    /// The name is invalid or taken, or the node has the maximum number of stores.
    pub fn reserve(&mut self, name: &str) -> Result<u32, String> {
        check_name(name)?;
        if self.busy.iter().any(|(_, busy)| busy == name) {
            return Err(format!("store '{name}' is being created or dropped: retry in a moment"));
        }
        if self.stores.contains_key(name) {
            return Err(format!("there is a store '{name}' already: drop it first, or choose another name"));
        }
        let used = |region: &u32| {
            self.busy.iter().any(|(busy, _)| busy == region) || self.by_region(*region).is_some()
        };
        let region = (1..REGIONS_MAX).find(|region| !used(region));
        let region = region
            .ok_or_else(|| format!("the node has {} stores, the maximum: drop one", REGIONS_MAX - 1))?;
        self.busy.push((region, name.to_owned()));
        Ok(region)
    }

    /// Sets the segments of a store. A node that takes over calls this after it has found the segments in the segment
    /// table.
    pub fn set_segments(&mut self, region: u32, segments: Vec<u32>) {
        if let Some(entry) = self.by_region_mut(region) {
            entry.segments = segments;
        }
    }

    /// Makes a region number and its store's name available again.
    pub fn release(&mut self, region: u32) {
        self.busy.retain(|(busy, _)| *busy != region);
    }

    /// Adds a store.
    pub fn insert(&mut self, entry: Entry<M>) {
        self.release(entry.store.region);
        self.leased += usize::from(entry.served.leases().is_some());
        let before = self.stores.insert(entry.store.name.clone(), entry);
        assert!(before.is_none(), "two stores have the same name");
    }

    /// Removes a store. The store's region stays reserved.
    ///
    /// # Errors
    /// No store has this name.
    pub fn remove(&mut self, name: &str) -> Result<Entry<M>, String> {
        self.get(name)?;
        let entry = self.stores.remove(name).ok_or_else(|| format!("there is no store '{name}'"))?;
        self.leased -= usize::from(entry.served.leases().is_some());
        self.busy.push((entry.store.region, name.to_owned()));
        Ok(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farside_fabrics::memory::Mapping;

    #[test]
    fn a_name_is_reserved_for_one_store_at_a_time() {
        let mut catalog = Catalog::<Mapping>::new(Vec::new());
        let region = catalog.reserve("twin").expect("a new name");
        assert!(catalog.reserve("twin").expect_err("being created").contains("being created"));
        let other = catalog.reserve("other").expect("a new name");
        assert_ne!(region, other);
        catalog.release(region);
        assert_eq!(catalog.reserve("twin"), Ok(region));
        for bad in ["", "a/b", "a b", "../x", &"x".repeat(NAME_MAX + 1)] {
            assert!(catalog.reserve(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_reserve_never_shrinks_as_buffers_grow() {
        let reserves: Vec<u64> = (0..5000).map(Division::reserve_of).collect();
        assert!(reserves.is_sorted());
        assert_eq!((reserves[0], reserves[127], reserves[128], reserves[4999]), (1, 1, 2, 16));
    }

    #[test]
    fn a_quota_is_divided_or_refused_and_never_wraps() {
        let mib = 1 << 20;
        assert_eq!(Division::of(64 * mib, mib), Ok(Division { table: 1, buffers: 63, reserve: 1 }));
        assert!(Division::of(mib, mib).is_err());
        assert!(Division::of(4096 << 40, mib).is_err());
        assert!(Division::of(u64::MAX, mib).is_err());
    }

    #[test]
    fn a_store_in_its_table_alone_gets_its_table_and_nothing_else() {
        let mib = 1 << 20;
        let of = |table| Ok(Division { table, buffers: 0, reserve: 0 });
        assert_eq!(Division::of_table(64 * mib, 64 * mib), of(64));
        assert_eq!(Division::of_table(64 * mib, 63 * mib + 1), of(64));
        assert_eq!(Division::of_table(mib, 0), of(1));
        assert!(Division::of_table(64 * mib, 64 * mib + 1).is_err());
        assert!(Division::of_table(mib - 1, 0).is_err());
        assert!(Division::of_table(u64::MAX, u64::MAX).is_err());
    }
}
