//! Which stores there are, and what each was granted.
//!
//! Invariant: a store's region is known to clients only once everything was granted; it is unknown, and its key
//! opens nothing, before anything is taken back.

use crate::rebuild::{self, Rebuild};
use crate::served::Served;
use farside_remote::Memory;
use farside_remote::arena::{REGIONS_MAX, SEGMENT_SIZE};
use farside_remote::control::Store;
use farside_remote::service::{Kind, Service};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The longest name of a store, in bytes.
pub const NAME_MAX: usize = 64;

/// A store with what the node keeps for it.
pub struct Entry<M: Memory> {
    /// As clients see it.
    pub store: Store,
    /// What its system does here.
    pub served: Arc<Served<M>>,
    /// Every segment that it was granted, for its tables, its buffers and its reserve.
    pub segments: Vec<u32>,
    /// While it gets another table.
    pub rebuild: Option<Rebuild>,
    /// Its service has found its table crowded.
    pub is_crowded: bool,
    /// It was to be rebuilt, and there was no room: so many segments must be free until it is tried again.
    pub(crate) room_needed: u32,
}

impl<M: Memory> Entry<M> {
    /// A store with nothing under way.
    pub(crate) fn new(store: Store, service: Box<dyn Service<M>>, segments: Vec<u32>) -> Entry<M> {
        let served = Served::new(&store, service);
        Entry { store, served, segments, rebuild: None, is_crowded: false, room_needed: 0 }
    }
}

/// The stores of a node, by name.
pub struct Catalog<M: Memory> {
    kinds: Vec<Box<dyn Kind<M>>>,
    stores: BTreeMap<String, Entry<M>>,
    /// Regions that are being made or unmade.
    busy: Vec<(u32, String)>,
}

/// # Errors
/// It is no name that a store can have.
pub(crate) fn check_name(name: &str) -> Result<(), String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.len() > NAME_MAX || !name.chars().all(plain) {
        return Err(format!(
            "'{}' is no name for a store: use 1 to {NAME_MAX} letters, digits, '-', '_' or '.'",
            name.escape_debug()
        ));
    }
    Ok(())
}

/// How a quota is divided, in segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Division {
    /// For the table, side by side.
    pub table: u32,
    /// For buffers, within the quota.
    pub buffers: u32,
    /// Beyond the quota, so that a full store can be emptied.
    pub reserve: u32,
}

impl Division {
    /// Of a quota of so many bytes with a table of so many.
    ///
    /// # Errors
    /// The quota does not hold the table and one segment of buffers.
    pub fn of(quota: u64, table_len: u64) -> Result<Division, String> {
        let quota_segments = quota / SEGMENT_SIZE;
        let table = table_len.div_ceil(SEGMENT_SIZE);
        if quota_segments <= table {
            return Err(format!(
                "a quota of {} MiB does not hold the table of {table} MiB and any item: give at least {} MiB, or \
                 fewer --items",
                quota_segments,
                table * 2
            ));
        }
        let buffers = quota_segments - table;
        let reserve = Division::reserve_of(buffers);
        let small =
            |n: u64| u32::try_from(n).map_err(|_| format!("a quota of {quota} bytes is too much: give less"));
        small(quota_segments + reserve)?;
        Ok(Division { table: small(table)?, buffers: small(buffers)?, reserve: small(reserve)? })
    }

    /// The reserve of a store with so many segments for buffers. More of them never have a smaller one, so that of a
    /// whole quota, in segments, it is the most that a node adds to that quota.
    pub fn reserve_of(buffers: u64) -> u64 {
        (buffers / 64).clamp(1, 16)
    }

    /// All of it.
    pub fn segments(&self) -> u32 {
        self.table + self.buffers + self.reserve
    }
}

impl<M: Memory> Catalog<M> {
    /// No stores yet, of these kinds.
    pub fn new(kinds: Vec<Box<dyn Kind<M>>>) -> Catalog<M> {
        Catalog { kinds, stores: BTreeMap::new(), busy: Vec::new() }
    }

    /// The kind of that name.
    ///
    /// # Errors
    /// There is none.
    pub fn kind(&self, name: &str) -> Result<&dyn Kind<M>, String> {
        self.kinds.iter().find(|kind| kind.name() == name).map(Box::as_ref).ok_or_else(|| {
            let known: Vec<&str> = self.kinds.iter().map(|kind| kind.name()).collect();
            format!("no store can be of kind '{name}': name one of {}", known.join(", "))
        })
    }

    /// The service of a store, with those of its former tables.
    ///
    /// # Errors
    /// The store is of no known kind, or its parameters are not such as its kind plans.
    pub(crate) fn serve(&self, store: &Store) -> Result<Box<dyn Service<M>>, String> {
        let mut service = self.kind(&store.kind)?.serve(&store.parameters, store.extent())?;
        match &store.formers()[..] {
            [] => Ok(service),
            formers => rebuild::of(&mut *service)?.succeed(formers),
        }
    }

    /// The store of that name.
    ///
    /// # Errors
    /// There is none.
    pub fn get(&self, name: &str) -> Result<&Entry<M>, String> {
        self.stores.get(name).ok_or_else(|| match self.stores.is_empty() {
            true => {
                format!("there is no store '{name}', nor any other: 'farside store create {name}' makes it")
            }
            false => {
                let names: Vec<&str> = self.stores.keys().map(String::as_str).collect();
                format!("there is no store '{name}': there are {}", names.join(", "))
            }
        })
    }

    /// All stores, by name.
    pub fn iter(&self) -> impl Iterator<Item = &Entry<M>> {
        self.stores.values()
    }

    /// All stores, by name, to be changed.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Entry<M>> {
        self.stores.values_mut()
    }

    /// The store whose region this is, to be changed.
    pub(crate) fn by_region_mut(&mut self, region: u32) -> Option<&mut Entry<M>> {
        self.stores.values_mut().find(|entry| entry.store.region == region)
    }

    /// The store whose region this is.
    pub fn by_region(&self, region: u32) -> Option<&Entry<M>> {
        self.stores.values().find(|entry| entry.store.region == region)
    }

    /// Reserves a region number for a store that is to be made.
    ///
    /// # Errors
    /// The name is taken or none, or there are as many stores as a node can have.
    pub fn reserve(&mut self, name: &str) -> Result<u32, String> {
        check_name(name)?;
        if self.busy.iter().any(|(_, busy)| busy == name) {
            return Err(format!("store '{name}' is being made or dropped just now: ask again in a moment"));
        }
        if self.stores.contains_key(name) {
            return Err(format!("there is a store '{name}' already: drop it first, or choose another name"));
        }
        let used = |region: &u32| {
            self.busy.iter().any(|(busy, _)| busy == region) || self.by_region(*region).is_some()
        };
        let region = (1..REGIONS_MAX).find(|region| !used(region));
        let region = region.ok_or_else(|| {
            format!("the node has {} stores, the most there can be: drop one", REGIONS_MAX - 1)
        })?;
        self.busy.push((region, name.to_owned()));
        Ok(region)
    }

    /// Notes which segments a store was found to have.
    pub fn set_segments(&mut self, region: u32, segments: Vec<u32>) {
        if let Some(entry) = self.by_region_mut(region) {
            entry.segments = segments;
        }
    }

    /// A region number is nobody's again.
    pub fn release(&mut self, region: u32) {
        self.busy.retain(|(busy, _)| *busy != region);
    }

    /// Makes a store known.
    pub fn insert(&mut self, entry: Entry<M>) {
        self.release(entry.store.region);
        let before = self.stores.insert(entry.store.name.clone(), entry);
        assert!(before.is_none(), "a name was given to two stores");
    }

    /// Makes a store unknown; its region stays reserved.
    ///
    /// # Errors
    /// There is none of that name.
    pub fn remove(&mut self, name: &str) -> Result<Entry<M>, String> {
        self.get(name)?;
        let entry = self.stores.remove(name).ok_or_else(|| format!("there is no store '{name}'"))?;
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
        assert!(catalog.reserve("twin").expect_err("being made").contains("being made"));
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
}
