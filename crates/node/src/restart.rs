//! What a node keeps in its own memory, and how another takes over after it has died.
//!
//! The catalog lies in one of two copies, each `| sequence u64 | length u64 | CRC u64 | JSON |`; the one with the
//! greater sequence and a sound CRC counts, so a death in the middle of writing leaves the other.
//!
//! A node takes over only when no process of an old session is alive (the host sees to that), so nobody runs chains
//! while it looks. Whatever step anyone was in the middle of is finished first. Then every segment and buffer is
//! one of a known store's, or becomes free: what the old node had in its hands (RETIRED and its own, PARKED) goes
//! back to its list; a granted segment that is on no list goes back to one; a segment of no known store is of a
//! store that was being made or dropped, and becomes zeros. What clients had in theirs, a scan finds.

use crate::catalog::{Catalog, Entry};
use crate::extents::Extents;
use crate::node::NodeMemory;
use farside_remote::arena::class::Class;
use farside_remote::arena::lists::Supply;
use farside_remote::arena::segment::Use;
use farside_remote::arena::state::{Stage, owner};
use farside_remote::arena::{Arena, CATALOG_SIZE, Geometry, header};
use farside_remote::control::Store;
use farside_remote::service::Kind;
use farside_remote::{Memory, Width};
use std::collections::{BTreeMap, BTreeSet};

const RECORD_HEADER: usize = 24;

/// Writes the next record of the catalog.
///
/// # Errors
/// The stores' descriptions do not fit.
pub(crate) fn record(sequence: u64, stores: &[&Store]) -> Result<Vec<u8>, String> {
    let json = serde_json::to_vec(stores).expect("plain data");
    if json.len() + RECORD_HEADER > CATALOG_SIZE as usize {
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

/// The catalog as it was last written, and its sequence; none in fresh memory.
fn newest_record<M: Memory>(memory: &M) -> Result<Option<(u64, Vec<Store>)>, M::Wait> {
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

fn parse(bytes: &[u8]) -> Option<(u64, Vec<Store>)> {
    let word = |i: usize| u64::from_le_bytes(bytes[i * 8..i * 8 + 8].try_into().expect("eight bytes"));
    let (sequence, len, crc) = (word(0), word(1), word(2));
    let json = bytes[RECORD_HEADER..].get(..usize::try_from(len).ok()?)?;
    if sequence == 0 || checksum(sequence, json) != crc {
        return None;
    }
    Some((sequence, serde_json::from_slice(json).ok()?))
}

/// What a node that takes over begins with.
pub(crate) struct Restored<M: Memory> {
    pub(crate) extents: Extents,
    pub(crate) catalog: Catalog<M>,
    pub(crate) sequence: u64,
    pub(crate) next_session: u32,
}

/// Takes over a memory that another node served; nobody else may use it meanwhile.
///
/// # Errors
/// The catalog names a kind that this release does not know, or describes what cannot be; nothing was changed but
/// what any client may change.
pub(crate) fn restore<M: NodeMemory>(
    memory: &M,
    kinds: Vec<Box<dyn Kind<M>>>,
) -> Result<Result<Restored<M>, String>, M::Wait> {
    let arena = Arena::of(memory);
    let (sequence, stores) = newest_record(memory)?.unwrap_or_default();
    let mut catalog = Catalog::new(kinds);
    let mut segments: BTreeMap<u32, Vec<u32>> =
        stores.iter().map(|store| (store.region, Vec::new())).collect();
    for store in &stores {
        let service =
            catalog.kind(&store.kind).and_then(|kind| kind.serve(&store.parameters, store.extent()));
        let service = match service {
            Ok(service) => service,
            Err(reason) => return Ok(Err(format!("store '{}' cannot be served: {reason}", store.name))),
        };
        catalog.insert(Entry { store: store.clone(), service, segments: Vec::new() });
    }
    let mut extents = Extents::new(arena.geometry().segments());
    for index in 0..arena.geometry().segments() {
        let segment = arena.segment(index)?;
        match segments.get_mut(&segment.region) {
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
    for region in 1..farside_remote::arena::REGIONS_MAX {
        match segments.get(&region) {
            Some(owned) => put_in_order(memory, region, owned)?,
            None => arena.clear_region(region)?,
        }
    }
    for (region, owned) in segments {
        catalog.set_segments(region, owned);
    }
    for slot in 0..farside_remote::arena::SESSIONS_MAX {
        arena.close_session(slot)?;
    }
    let next_session = memory.load(header::NEXT_SESSION_AT, Width::W8)? as u32;
    Ok(Ok(Restored { extents, catalog, sequence, next_session }))
}

/// Finishes what anyone was in the middle of in a region, and puts what the old node held back where it belongs.
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
        // What the old node had taken off a list to park it.
        let taken = state.stage == Stage::Live && state.owner == owner::NODE;
        if held || taken {
            arena.give(region, &buffer)?;
        }
        ordinal += 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_that_is_cut_or_changed_does_not_count() {
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
