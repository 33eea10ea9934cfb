//! The catalog in the node's memory, and how a new node takes over this memory after the old node's death.
//!
//! The catalog has two copies, each `| sequence u64 | length u64 | CRC u64 | JSON |`. A node reads the copy with the
//! greater sequence among those with a valid CRC. So if a node dies while it writes one copy, the other copy remains.
//! The CRC detects a torn record, not a forged one, so the node validates the contents like any untrusted input before
//! it changes anything.
//!
//! A node takes over only when no process of an old session is alive (the host ensures that), so no chain runs in the
//! meantime. It first completes every unfinished step. Then it assigns every segment and buffer to a known store, or
//! frees it:
//!
//! - Buffers that the old node held (RETIRED and owned by the node, or PARKED) return to their lists.
//! - A granted segment that is on no list returns to one.
//! - A segment of an unknown store, which was being created or dropped, is zeroed and freed. So is a segment of a table
//!   that a store no longer has, or does not have yet.
//! - A rebuild whose two tables are both in the catalog continues.
//! - A scan finds the buffers that clients held.

use crate::catalog::{Catalog, Entry, check_name};
use crate::extents::Extents;
use crate::log::pairing::Paired;
use crate::node::NodeMemory;
use crate::rebuild::{Rebuild, segments_of};
use farside_remote::arena::class::Class;
use farside_remote::arena::lists::Supply;
use farside_remote::arena::segment::Use;
use farside_remote::arena::state::{Stage, State, owner};
use farside_remote::arena::{Arena, CATALOG_SIZE, Geometry, REGIONS_MAX, SEGMENT_SIZE, header};
use farside_remote::control::{MemberState, Register, Store};
use farside_remote::service::Kind;
use farside_remote::{Memory, Width};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

const RECORD_HEADER: usize = 24;

/// A store as the catalog in the node's memory describes it.
#[derive(Serialize)]
pub(crate) struct Recorded<'a> {
    #[serde(flatten)]
    pub(crate) store: &'a Store,
    /// Nonces of the clients that were fenced for the store.
    #[serde(skip_serializing_if = "no_nonces")]
    pub(crate) fenced: Cow<'a, BTreeSet<u64>>,
    /// The member's part of the register that decides on the store's next configuration.
    #[serde(skip_serializing_if = "is_unused")]
    pub(crate) register: Cow<'a, Register>,
    /// The memory's relation to the store's log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) paired: Option<Paired>,
}

fn is_unused(register: &Register) -> bool {
    *register == Register::default()
}

fn no_nonces(fenced: &BTreeSet<u64>) -> bool {
    fenced.is_empty()
}

impl<'a> From<&'a Store> for Recorded<'a> {
    /// A store without a log for which no client was fenced and whose register is unused.
    fn from(store: &'a Store) -> Recorded<'a> {
        let register = Cow::Owned(Register::default());
        Recorded { store, fenced: Cow::Owned(BTreeSet::new()), register, paired: None }
    }
}

impl<'a, M: Memory> From<&'a Entry<M>> for Recorded<'a> {
    fn from(entry: &'a Entry<M>) -> Recorded<'a> {
        let (fenced, register) = (Cow::Borrowed(&entry.fenced), Cow::Borrowed(&entry.register));
        Recorded { store: &entry.store, fenced, register, paired: entry.paired }
    }
}

/// A store as it was read from the catalog in a memory. Unchecked.
#[derive(Debug, PartialEq, Deserialize)]
struct Read {
    #[serde(flatten)]
    store: Store,
    #[serde(default)]
    fenced: BTreeSet<u64>,
    #[serde(default)]
    register: Register,
    #[serde(default)]
    paired: Option<Paired>,
}

/// Encodes a record of the catalog.
///
/// # Errors
/// The stores' descriptions do not fit into one copy of the catalog.
pub(crate) fn record(sequence: u64, stores: &[Recorded<'_>]) -> Result<Vec<u8>, String> {
    let json = serde_json::to_vec(stores).expect("plain data");
    // A store in another state now must fit when it is COMMITTED, which is the longest word.
    let growth = |store: &Recorded<'_>| match store.store.membership.as_ref().map(|of| of.state) {
        Some(MemberState::Prepared) => "committed".len() - "prepared".len(),
        Some(MemberState::Revoked | MemberState::Joining) => "committed".len() - "revoked".len(),
        Some(MemberState::Committed | MemberState::Aborted) | None => 0,
    };
    let growth: usize = stores.iter().map(growth).sum();
    if json.len() + growth + RECORD_HEADER > CATALOG_SIZE as usize {
        return Err(format!("the catalog is full with {} stores: drop one", stores.len() - 1));
    }
    let mut record = Vec::with_capacity(RECORD_HEADER + json.len());
    record.extend_from_slice(&sequence.to_le_bytes());
    record.extend_from_slice(&(json.len() as u64).to_le_bytes());
    record.extend_from_slice(&checksum(sequence, &json).to_le_bytes());
    record.extend_from_slice(&json);
    Ok(record)
}

fn checksum(sequence: u64, json: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, json) ^ sequence.rotate_left(32)
}

/// The newest catalog: its sequence and its stores. `None` in fresh memory.
fn newest_record<M: Memory>(memory: &M) -> Result<Option<(u64, Vec<Read>)>, M::Wait> {
    let mut newest = None;
    for copy in 0..2 {
        let mut bytes = vec![0; CATALOG_SIZE as usize];
        memory.read(Geometry::catalog_at(copy), &mut bytes)?;
        let sound = parse(&bytes);
        if sound.as_ref().map(|(sequence, _)| *sequence) > newest.as_ref().map(|(sequence, _)| *sequence) {
            newest = sound;
        }
    }
    Ok(newest)
}

fn parse(bytes: &[u8]) -> Option<(u64, Vec<Read>)> {
    let word = |i: usize| u64::from_le_bytes(bytes[i * 8..i * 8 + 8].try_into().expect("eight bytes"));
    let (sequence, len, crc) = (word(0), word(1), word(2));
    let json = bytes[RECORD_HEADER..].get(..usize::try_from(len).ok()?)?;
    if sequence == 0 || checksum(sequence, json) != crc {
        return None;
    }
    Some((sequence, serde_json::from_slice(json).ok()?))
}

/// Initial state of a node that takes over.
pub(crate) struct Restored<M: Memory> {
    pub(crate) extents: Extents,
    pub(crate) catalog: Catalog<M>,
    pub(crate) sequence: u64,
    pub(crate) next_session: u32,
}

/// Takes over a memory that another node served. No other process may use the memory in the meantime.
///
/// # Errors
/// The catalog names an unsupported kind, or is inconsistent. The node has then made only changes that a client may
/// also make.
pub(crate) fn restore<M: NodeMemory>(
    memory: &M,
    kinds: Vec<Box<dyn Kind<M>>>,
) -> Result<Result<Restored<M>, String>, M::Wait> {
    let (arena, geometry) = (Arena::of(memory), memory.geometry());
    let (sequence, read) = newest_record(memory)?.unwrap_or_default();
    let (stores, kept): (Vec<Store>, Vec<_>) = read
        .into_iter()
        .map(|Read { store, fenced, register, paired }| (store, (fenced, register, paired)))
        .unzip();
    let next_session = memory.load(header::NEXT_SESSION_AT, Width::W8)? as u64;
    let malformed = kept.iter().find_map(|(_, register, _)| register.check().err());
    let malformed = malformed.map(|wrong| format!("the catalog has an invalid register of a store: {wrong}"));
    if let Some(wrong) = check(memory, sequence, &stores, next_session)?.err().or(malformed) {
        return Ok(Err(format!(
            "{wrong}: the memory was modified by another program; serve another --memory-file, and load a dump"
        )));
    }
    let mut catalog = Catalog::new(kinds);
    let mut segments: BTreeMap<u32, Vec<u32>> =
        stores.iter().map(|store| (store.region, Vec::new())).collect();
    for (store, (fenced, register, paired)) in stores.iter().zip(kept) {
        let service = match catalog.serve(store) {
            Ok(service) => service,
            Err(reason) => return Ok(Err(format!("store '{}' cannot be served: {reason}", store.name))),
        };
        let mut entry = Entry::new(store.clone(), service, Vec::new());
        entry.rebuild = store.former.as_ref().map(Rebuild::resumed);
        (entry.fenced, entry.register, entry.paired) = (fenced, register, paired);
        catalog.insert(entry);
    }
    let tables: BTreeSet<u32> =
        stores.iter().flat_map(tables_of).flat_map(|(at, len)| segments_of(geometry, at, len)).collect();
    let mut extents = Extents::new(geometry.segments());
    for index in 0..geometry.segments() {
        let segment = arena.segment(index)?;
        let is_left = segment.usage == Use::Table && !tables.contains(&index);
        match segments.get_mut(&segment.region).filter(|_| !is_left) {
            Some(owned) => {
                extents.take_exactly(index);
                owned.push(index);
            }
            None if segment.usage != Use::Free => {
                memory.discard(index)?;
                arena.assign(index, segment, 0, Use::Free)?;
            }
            None => {}
        }
    }
    for region in 1..REGIONS_MAX {
        match segments.get(&region) {
            Some(owned) => put_in_order(memory, region, owned)?,
            None => arena.clear_region(region)?,
        }
    }
    for store in &stores {
        arena.set_reuse(store.region, false)?;
        // The old node may have died after it had written the record and before it wrote the key: write the key.
        // The key of a PREPARED store opens nothing.
        arena.set_secret(store.region, if store.is_prepared() { 0 } else { store.secret })?;
    }
    for (region, owned) in segments {
        catalog.set_segments(region, owned);
    }
    for slot in 0..farside_remote::arena::SESSIONS_MAX {
        arena.close_session(slot)?;
    }
    memory.write(header::SLOTS_AT, &[0; 8])?;
    Ok(Ok(Restored { extents, catalog, sequence, next_session: next_session as u32 }))
}

/// Maxima of the numbers that a record may contain. No real memory reaches them, and this node needs larger numbers to
/// continue.
const SEQUENCE_MAX: u64 = u64::MAX / 2;
const NEXT_SESSION_MAX: u64 = owner::NODE as u64 / 2;

/// Checks that a node can have written these stores and numbers, and that this node can continue from them.
fn check<M: Memory>(
    memory: &M,
    sequence: u64,
    stores: &[Store],
    next_session: u64,
) -> Result<Result<(), String>, M::Wait> {
    if sequence > SEQUENCE_MAX || next_session > NEXT_SESSION_MAX {
        return Ok(Err(format!(
            "the memory counts {sequence} catalogs and {next_session} sessions, more than a node supports"
        )));
    }
    let (mut names, mut regions) = (BTreeSet::new(), BTreeSet::new());
    for store in stores {
        if let Err(wrong) = check_name(&store.name) {
            return Ok(Err(format!("the catalog names a store with an {wrong}")));
        }
        if !names.insert(&store.name) {
            return Ok(Err(format!("the catalog has two stores '{}'", store.name)));
        }
        if !(1..REGIONS_MAX).contains(&store.region) || !regions.insert(store.region) {
            return Ok(Err(format!(
                "the catalog gives store '{}' region {}, which is invalid or another store's",
                store.name, store.region
            )));
        }
        if let Some(Err(wrong)) =
            store.membership.as_ref().map(|membership| membership.check(store.incarnation))
        {
            return Ok(Err(format!("the catalog gives store '{}' invalid members: {wrong}", store.name)));
        }
        for (table_at, table_len) in tables_of(store) {
            if !is_table(memory, store.region, table_at, table_len)? {
                return Ok(Err(format!(
                    "the catalog gives store '{}' a table of {table_len} bytes at {table_at:#x}, where it has none",
                    store.name
                )));
            }
        }
    }
    Ok(Ok(()))
}

/// Addresses and sizes (bytes) of a store's tables. A store that is being rebuilt has several tables.
fn tables_of(store: &Store) -> impl Iterator<Item = (u64, u64)> {
    let extents = store.formers().into_iter().map(|(_, extent)| extent).chain([store.extent()]);
    extents.map(|extent| (extent.at, extent.len)).collect::<Vec<_>>().into_iter()
}

/// Whether a table consists of whole segments that are assigned to the region as tables.
fn is_table<M: Memory>(memory: &M, region: u32, table_at: u64, table_len: u64) -> Result<bool, M::Wait> {
    let (arena, geometry) = (Arena::of(memory), memory.geometry());
    let first = geometry.segment_of(table_at).filter(|&index| geometry.segment_at(index) == table_at);
    let Some(first) = first else { return Ok(false) };
    let (count, left) = (table_len / SEGMENT_SIZE, u64::from(geometry.segments() - first));
    if count == 0 || count > left || !table_len.is_multiple_of(SEGMENT_SIZE) {
        return Ok(false);
    }
    for index in first..first + count as u32 {
        let segment = arena.segment(index)?;
        if segment.region != region || segment.usage != Use::Table {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Completes the unfinished steps in a region, and returns to their lists the buffers and segments that the old node
/// held.
fn put_in_order<M: NodeMemory>(memory: &M, region: u32, segments: &[u32]) -> Result<(), M::Wait> {
    let arena = Arena::of(memory);
    let mut listed = BTreeSet::new();
    for supply in [Supply::Quota, Supply::Reserve] {
        listed.extend(arena.granted(region, supply)?);
    }
    for class in Class::all() {
        arena.settle(region, class)?;
    }
    for &index in segments {
        match arena.segment(index)?.usage {
            Use::Granted if !listed.contains(&index) => {
                memory.discard(index)?;
                arena.grant(region, Supply::Quota, index)?;
            }
            Use::Buffers(_) => give_back_held(memory, region, index)?,
            Use::Granted | Use::Table | Use::Free => {}
        }
    }
    Ok(())
}

fn give_back_held<M: NodeMemory>(memory: &M, region: u32, index: u32) -> Result<(), M::Wait> {
    let arena = Arena::of(memory);
    let mut ordinal = 0;
    while let Some((buffer, state)) = arena.buffer_state(index, ordinal)? {
        let held =
            state.stage == Stage::Parked || state.stage == Stage::Retired && state.owner == owner::NODE;
        // The old node had taken the buffer off a free list to park it.
        let taken = state.stage == Stage::Live && state.owner == owner::NODE;
        if held || taken {
            arena.give(region, &buffer)?;
        }
        // A service's buffer is reachable, or part of an unfinished call. Remove its owner, so that the scan decides.
        if state.stage == Stage::Live && state.owner == owner::SERVICE {
            arena.exchange_state(&buffer, state, State { owner: owner::NONE, ..state })?;
        }
        ordinal += 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use farside_fabrics::memory::{Mapping, Pages};
    use farside_remote::control::{Accepted, MemberId};
    use farside_remote::service::{Extent, Plan, Service};

    /// A kind whose service reaches no buffers and accepts any table.
    struct Plain;

    impl Kind<Mapping> for Plain {
        fn name(&self) -> &'static str {
            "plain"
        }
        fn plan(&self, _: &str, _: u64, _: u64) -> Result<Plan, String> {
            Err("not used by tests".into())
        }
        fn serve(&self, _: &str, _: Extent) -> Result<Box<dyn Service<Mapping>>, String> {
            Ok(Box::new(Plain))
        }
    }

    impl Service<Mapping> for Plain {
        fn live(
            &self,
            _: &Mapping,
            _: u64,
            _: &mut Vec<u64>,
        ) -> Result<Option<u64>, std::convert::Infallible> {
            Ok(None)
        }
    }

    /// A memory with the stores a and b, each with a table of two segments. The region of b is 7.
    fn two_stores() -> (Mapping, Vec<Store>) {
        let memory = Mapping::create(16 << 20, Pages::Small).expect("memory");
        let mut stores = Vec::new();
        for (name, region, first) in [("a", 1, 0), ("b", 7, 2)] {
            for index in first..first + 2 {
                let Ok(free) = memory.arena().segment(index);
                let Ok(true) = memory.arena().assign(index, free, region, Use::Table) else {
                    panic!("no other process assigns segments")
                };
            }
            stores.push(Store {
                name: name.into(),
                kind: "plain".into(),
                parameters: String::new(),
                quota: 4 << 20,
                incarnation: memory.incarnation(),
                region,
                secret: 9,
                table_at: memory.geometry().segment_at(first),
                table_len: 2 * SEGMENT_SIZE,
                wide: false,
                created: 0,
                id: 0,
                former: None,
                membership: None,
            });
        }
        (memory, stores)
    }

    fn take_over(memory: &Mapping, sequence: u64, stores: &[Store]) -> Result<Restored<Mapping>, String> {
        let stores: Vec<Recorded<'_>> = stores.iter().map(Recorded::from).collect();
        let Ok(()) = memory.write(Geometry::catalog_at(0), &record(sequence, &stores).expect("it fits"));
        let Ok(restored) = restore(memory, vec![Box::new(Plain)]);
        restored
    }

    #[track_caller]
    fn refused(memory: &Mapping, sequence: u64, stores: &[Store], reason: &str) {
        let refusal = take_over(memory, sequence, stores).map(drop).expect_err("it cannot be served");
        assert!(refusal.contains(reason) && refusal.contains("another --memory-file"), "{refusal}");
    }

    #[test]
    fn a_forged_catalog_is_refused_with_a_remedy() {
        type Damage = fn(&mut Vec<Store>);
        let damages: [(Damage, &str); 16] = [
            (|stores| stores[0].region = 0, "region 0"),
            (|stores| stores[0].region = REGIONS_MAX, "region 256"),
            (|stores| stores[0].region = u32::MAX, "region 4294967295"),
            (|stores| stores[1].region = 1, "region 1"),
            (|stores| stores[1].name = "a".into(), "two stores 'a'"),
            (|stores| stores[1].name = "a\x1b[2J".into(), "invalid store name"),
            (|stores| stores[1].name.clear(), "invalid store name"),
            (|stores| stores[0].table_at = 64, "at 0x40"),
            (|stores| stores[0].table_at += 16, "where it has none"),
            (|stores| stores[0].table_at = u64::MAX - 4095, "where it has none"),
            (|stores| stores[0].table_at = stores[1].table_at, "where it has none"),
            (|stores| stores[0].table_len = 0, "where it has none"),
            (|stores| stores[0].table_len -= 1, "where it has none"),
            (|stores| stores[0].table_len *= 2, "where it has none"),
            (|stores| stores[1].table_len = 1 << 40, "where it has none"),
            (|stores| stores[1].table_len = !(SEGMENT_SIZE - 1), "where it has none"),
        ];
        for (damage, reason) in damages {
            let (memory, mut stores) = two_stores();
            damage(&mut stores);
            refused(&memory, 1, &stores, reason);
        }
        let (memory, stores) = two_stores();
        assert_eq!(take_over(&memory, 1, &stores).expect("the catalog is valid").catalog.iter().count(), 2);
    }

    #[test]
    fn a_forged_register_is_refused_with_a_remedy() {
        let members = |incarnations: [u64; 2]| {
            incarnations.map(|incarnation| MemberId { node: 0, incarnation }).to_vec()
        };
        let register =
            |promised, ballot, members| Register { promised, accepted: Some(Accepted { ballot, members }) };
        for (register, reason) in [
            (register([1, 2], [1, 3], members([1, 2])), "more than it promised"),
            (register([1, 2], [1, 2], members([1, 1])), "the same node's memory"),
            (register([1, 2], [1, 2], Vec::new()), "2 to 64 members"),
            (register([1, 2], [1, 2], members([1, 2])), ""),
        ] {
            let (memory, stores) = two_stores();
            let record_of = |store| Recorded { register: Cow::Borrowed(&register), ..Recorded::from(store) };
            let recorded: Vec<Recorded<'_>> = stores.iter().map(record_of).collect();
            let Ok(()) = memory.write(Geometry::catalog_at(0), &record(1, &recorded).expect("it fits"));
            let Ok(restored) = restore(&memory, vec![Box::new(Plain)]);
            match restored.map(|restored| restored.catalog.iter().all(|entry| entry.register == register)) {
                Ok(is_kept) => assert!(is_kept && reason.is_empty()),
                Err(refusal) => assert!(refusal.contains(reason) && !reason.is_empty(), "{refusal}"),
            }
        }
    }

    #[test]
    fn restored_stores_are_unchanged_and_older_ones_are_not_wide() {
        let (memory, mut stores) = two_stores();
        stores[1].wide = true;
        let restored = take_over(&memory, 1, &stores).expect("the catalog is valid");
        assert!(restored.catalog.iter().map(|entry| &entry.store).eq(&stores));
        let mut older = serde_json::to_value(&stores[0]).expect("plain data");
        let said = older.as_object_mut().and_then(|store| store.remove("wide"));
        assert_eq!(said, Some(false.into()));
        assert_eq!(serde_json::from_value::<Store>(older).expect("it can be read"), stores[0]);
    }

    #[test]
    fn a_memory_with_exhausted_counters_is_refused_with_a_remedy() {
        let (memory, stores) = two_stores();
        refused(&memory, u64::MAX, &stores, "catalogs");
        for next in [u64::from(u32::MAX), u64::from(u32::MAX) - 1, 1 << 32, u64::MAX] {
            let Ok(()) = memory.write(header::NEXT_SESSION_AT, &next.to_le_bytes());
            refused(&memory, 1, &stores, "sessions");
        }
        let Ok(()) = memory.write(header::NEXT_SESSION_AT, &77u64.to_le_bytes());
        assert_eq!(take_over(&memory, 1, &stores).expect("the catalog is valid").next_session, 77);
    }

    #[test]
    fn a_truncated_or_modified_record_is_ignored() {
        let good = record(3, &[]).expect("it fits");
        let mut copy = vec![0; CATALOG_SIZE as usize];
        copy[..good.len()].copy_from_slice(&good);
        assert_eq!(parse(&copy), Some((3, Vec::new())));
        for at in 0..good.len() {
            let mut bad = copy.clone();
            bad[at] ^= 0x10;
            assert_eq!(parse(&bad), None, "byte {at}");
        }
        assert_eq!(parse(&vec![0; CATALOG_SIZE as usize]), None);
    }
}
