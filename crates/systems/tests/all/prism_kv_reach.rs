//! Tests of a node's scan of a store whose slots and items a malicious client has overwritten.
//!
//! Invariant: one step for one slot reads at most one item and reports at most its parts, whatever the slots and items
//! contain.

use farside_fabrics::memory::{Mapping, Pages};
use farside_remote::arena::class::Class;
use farside_remote::arena::lists::Supply;
use farside_remote::arena::segment::Use;
use farside_remote::arena::{Arena, SEGMENT_SIZE};
use farside_remote::service::{Extent, Kind as _, Service};
use farside_remote::{Key, Memory};
use farside_systems::kv::prism_kv::layout::{
    HEADER_SIZE, ITEM_MAX, ItemHeader, Kind, PART_MAX, PARTS_MAX, Placement, SLOT_SIZE, TableSpec,
};
use farside_systems::kv::prism_kv::service::PrismKvKind;
use std::convert::Infallible;
use zerocopy::IntoBytes;

const TABLE_SEGMENTS: u32 = 3;

/// A store in memory that a test fills by hand: a table of three segments, and buffers of 64 KiB.
struct Store {
    memory: Mapping,
    table: u64,
}

impl Store {
    fn new() -> Store {
        let memory = Mapping::create(16 << 20, Pages::Small).expect("memory");
        for index in 0..7 {
            let arena = memory.arena();
            let Ok(free) = arena.segment(index);
            let region = if index == 6 { 2 } else { 1 };
            let usage = if index < TABLE_SEGMENTS { Use::Table } else { Use::Granted };
            let Ok(true) = arena.assign(index, free, region, usage) else {
                panic!("no other process uses the memory")
            };
            if usage == Use::Granted {
                let Ok(()) = arena.grant(region, Supply::Quota, index);
            }
        }
        let table = memory.geometry().segment_at(0);
        Store { memory, table }
    }

    fn take(&self, region: u32) -> u64 {
        let class = Class::get(40).expect("a class");
        let Ok(taken) = Arena::of(&self.memory).take(region, class, Supply::Quota, 1);
        taken.expect("a buffer is free")
    }

    /// Makes slot `index` point to `len` bytes at the address `at`.
    fn point(&self, index: u64, at: u64, len: u32) {
        let mut slot = [0; SLOT_SIZE as usize];
        slot[..8].copy_from_slice(&at.to_le_bytes());
        slot[8..12].copy_from_slice(&len.to_le_bytes());
        slot[12] = 1;
        let Ok(()) = self.memory.write(self.table + index * SLOT_SIZE, &slot);
    }

    /// Writes a large item with these parts to the address `at`. Each part is an address and a length. Returns the
    /// item's length in bytes.
    fn write_large(&self, at: u64, parts: &[(u64, u32)]) -> u32 {
        let value_len: u64 = parts.iter().map(|&(_, len)| u64::from(len)).sum();
        let header = ItemHeader {
            generation: 1.into(),
            key_len: 0.into(),
            kind: Kind::Large as u8,
            flags: 0,
            value_len: (value_len as u32).into(),
            reserved: 0.into(),
        };
        let mut bytes = header.as_bytes().to_vec();
        for (part, len) in parts {
            bytes.extend_from_slice(&part.to_le_bytes());
            bytes.extend_from_slice(&u64::from(*len).to_le_bytes());
        }
        let Ok(()) = self.memory.write(at, &bytes);
        bytes.len() as u32
    }

    /// Returns the addresses that the first four steps of a scan report, in order.
    fn found(&self) -> Vec<u64> {
        let spec = TableSpec { slots: 1 << 17, seed: 7, placement: Placement::Hashed, epoch: 1, floor: 0 };
        let extent =
            Extent { key: Key::new(1, 1), at: self.table, len: u64::from(TABLE_SEGMENTS) * SEGMENT_SIZE };
        let parameters = serde_json::to_string(&spec).expect("plain data");
        let service: Box<dyn Service<Mapping>> = PrismKvKind.serve(&parameters, extent).expect("a table");
        let (mut found, mut cursor) = (Vec::new(), 0);
        for _ in 0..4 {
            let next: Result<_, Infallible> = service.live(&self.memory, cursor, &mut found);
            let Ok(next) = next;
            cursor = next.expect("the table has more slots");
        }
        found
    }
}

#[test]
fn a_scan_reports_an_item_and_its_parts() {
    let store = Store::new();
    let (head, small) = (store.take(1), store.take(1));
    let parts: Vec<(u64, u32)> = (0..PARTS_MAX as u64).map(|n| (store.table + n, 1000)).collect();
    let len = store.write_large(head, &parts);
    store.point(0, head, len);
    store.point(9, small, ITEM_MAX as u32);
    let expected = [head].into_iter().chain(parts.iter().map(|&(at, _)| at)).chain([small]);
    assert_eq!(store.found(), expected.collect::<Vec<u64>>());
}

#[test]
fn slots_that_no_client_writes_reach_nothing() {
    let store = Store::new();
    let (mine, other) = (store.take(1), store.take(2));
    let header = HEADER_SIZE as u32;
    // A slot that points into the table, to a large item with many parts. A scan that followed the slot would read the
    // whole item.
    let len = store.write_large(store.table + SEGMENT_SIZE, &[(mine, 0); 100]);
    store.point(0, store.table + SEGMENT_SIZE, 2 * SEGMENT_SIZE as u32);
    store.point(1, store.table + SEGMENT_SIZE, len);
    store.point(2, mine + 16, header);
    store.point(3, mine, header - 1);
    store.point(4, mine, ITEM_MAX as u32 + 1);
    store.point(5, other, header);
    store.point(6, store.memory.geometry().segment_at(3), header);
    store.point(7, store.memory.geometry().segment_at(9), header);
    store.point(8, u64::MAX - 3, u32::MAX);
    store.point(10, 64, header);
    assert_eq!(store.found(), Vec::<u64>::new());
}

#[test]
fn a_large_item_that_no_client_writes_has_no_parts() {
    let store = Store::new();
    let full = (ITEM_MAX - HEADER_SIZE) / 16;
    let lists: [Vec<(u64, u32)>; 4] = [
        vec![(store.table, 0); full],
        vec![(store.table, 1); PARTS_MAX + 1],
        vec![],
        vec![(store.table, PART_MAX as u32 + 1)],
    ];
    for (slot, list) in (0..).zip(&lists) {
        let head = store.take(1);
        let len = store.write_large(head, list);
        store.point(slot, head, len);
    }
    assert_eq!(store.found().len(), lists.len(), "the heads alone");
}
