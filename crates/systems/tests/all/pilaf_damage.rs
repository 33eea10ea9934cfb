//! Tests of Pilaf after a node failure, and with malicious clients: no panic, no lost item, and no effect on other
//! stores.

use crate::support::{Home, go, paced, run};
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::block_on;
use farside_fabrics::layer::count::Count;
use farside_fabrics::memory::{Mapping, MappingError};
use farside_node::host::Options;
use farside_remote::control::{Ask, Store};
use farside_remote::service::address;
use farside_remote::{Fabric, FabricError, Memory, NodeId, Status};
use farside_systems::kv::pilaf::layout::{
    Answer, ENTRY_SIZE, Entry, EntryState, IN_USE, ITEM_MAX, Op, Outcome, Table, crc,
};
use farside_systems::kv::pilaf::{ATTEMPTS_MAX, KIND, Pilaf};
use farside_systems::kv::{Kv, KvError};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

type Client = Pilaf<Rc<Count<Direct>>>;

fn client(home: &Home, name: &str) -> Client {
    block_on((), Pilaf::open(home.endpoint(), NodeId(0), name)).expect("the store exists")
}

fn value_of(client: &mut Client, key: &[u8]) -> Result<Option<Vec<u8>>, KvError> {
    go!(client, get(key)).map(|item| item.map(|item| item.value.to_vec()))
}

// Node failures.

/// Maps the memory file. Retries, because a process that another test has just forked shares the file's lock until
/// this process starts its own program.
fn mapped(path: &Path) -> Mapping {
    for _ in 0..500 {
        match Mapping::open(path, 8 << 20) {
            Err(MappingError::Foreign(_)) => std::thread::sleep(Duration::from_millis(10)),
            opened => return opened.expect("the file can be mapped").0,
        }
    }
    panic!("the file stays locked");
}

#[test]
fn a_node_failure_at_any_access_loses_no_item_and_no_buffer() {
    const KEYS: u32 = 20;
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("memory");
    let serve = |take_over: bool| {
        let memory = mapped(&path);
        Home::with(memory, Options { take_over, ..Options::default() })
    };
    let home = serve(false);
    let store = home.create_of(KIND, "s", 4, r#"{"items": 40}"#);
    let mut kv = client(&home, "s");
    for key in 0..KEYS {
        go!(kv, put(&key.to_le_bytes(), b"kept")).expect("stored");
    }
    go!(kv, put(b"k", b"old")).expect("stored");
    drop((kv, home));
    let (mut torn, mut last) = (0, Some(b"old".to_vec()));
    for call in [(Op::Put, &b"k"[..], &b"new"[..]), (Op::Delete, b"k", b""), (Op::Put, b"k", b"old")] {
        for accesses in 0.. {
            let home = serve(true);
            let made = paced::interrupted(home.host.memory(), &store, call, accesses);
            drop(home);
            let home = serve(true);
            let table = Table::new(&store.parameters, store.extent()).expect("its own parameters");
            let is_torn = |slot| entry_of(&home, &table, slot).decode() == EntryState::Torn;
            torn += usize::from(table.probe(b"k").any(is_torn));
            let done = (call.0 == Op::Put).then(|| call.2.to_vec());
            // A scan before the first call must follow torn entries, too.
            home.ask(Ask::Scan { name: "s".into() });
            let mut kv = client(&home, "s");
            let value = value_of(&mut kv, b"k").expect("the entry is repaired");
            assert!(value == done || value == last, "{call:?} after {accesses}: {value:?}");
            for key in 0..KEYS {
                assert_eq!(value_of(&mut kv, &key.to_le_bytes()), Ok(Some(b"kept".to_vec())));
            }
            home.ask(Ask::Scan { name: "s".into() });
            let live = u64::from(KEYS) + u64::from(value.is_some());
            assert_eq!(home.settled("s").live_buffers, live, "{call:?} after {accesses}");
            last = value;
            if made < accesses {
                break;
            }
            // The call took effect or it did not. If it did, restore the state before it.
            if last == done {
                match (call.0, &last) {
                    (Op::Put, _) if call.2 == b"old" => assert!(go!(kv, delete(b"k")).expect("deleted")),
                    _ => go!(kv, put(b"k", if call.0 == Op::Put { b"old" } else { b"new" })).expect("stored"),
                }
                last = value_of(&mut kv, b"k").expect("read");
            }
        }
    }
    assert!(torn >= 3, "an entry was torn {torn} times");
}

/// The next node repairs the torn entry from the head, before it runs another call.
#[test]
fn a_torn_entry_is_repaired_from_the_head() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("memory");
    let serve = |take_over: bool| {
        let memory = mapped(&path);
        Home::with(memory, Options { take_over, ..Options::default() })
    };
    let home = serve(false);
    let store = home.create_of(KIND, "s", 4, r#"{"items": 1}"#);
    go!(client(&home, "s"), put(b"k", b"kept")).expect("stored");
    let table = Table::new(&store.parameters, store.extent()).expect("its own parameters");
    let slot = table.probe(b"k").next().expect("a slot");
    let good = entry_of(&home, &table, slot);
    drop(home);
    for torn in [Entry { ptr: 0.into(), ..good }, Entry { crc_entry: 0.into(), ..good }] {
        let home = serve(true);
        let Ok(()) = home.host.memory().write(table.entry_at(slot), torn.as_bytes());
        assert_eq!(value_of(&mut client(&home, "s"), b"k"), Ok(Some(b"kept".to_vec())));
        assert_eq!(entry_of(&home, &table, slot), good);
    }
}

fn entry_of(home: &Home, table: &Table, slot: u64) -> Entry {
    let mut bytes = [0; ENTRY_SIZE as usize];
    let Ok(()) = home.host.memory().read(table.entry_at(slot), &mut bytes);
    Entry::read_from_bytes(&bytes).expect("an entry's size")
}

// Malicious clients with the store's key.

/// A store with two keys, and another store on the same node.
struct Rig {
    home: Home,
    table: Table,
    kv: Client,
    other: Client,
    other_store: Store,
}

const KEY: [u8; 8] = 7u64.to_be_bytes();
const NEIGHBOUR: [u8; 8] = 9u64.to_be_bytes();

impl Rig {
    fn new() -> Rig {
        let home = Home::new(16);
        let store = home.create_of(KIND, "s", 4, r#"{"items": 1, "placement": "permuted"}"#);
        let other_store = home.create_of(KIND, "other", 4, r#"{"items": 1}"#);
        let (mut kv, mut other) = (client(&home, "s"), client(&home, "other"));
        go!(kv, put(&KEY, b"value")).expect("stored");
        // The last put is to another key, so that the head does not hold this key's entry.
        go!(kv, put(&NEIGHBOUR, b"neighbour")).expect("stored");
        go!(other, put(b"mine", b"untouched")).expect("stored");
        let table = Table::new(&store.parameters, store.extent()).expect("its own parameters");
        Rig { home, table, kv, other, other_store }
    }

    fn slot(&self, key: &[u8]) -> u64 {
        self.table.probe(key).next().expect("a slot")
    }

    fn spoil(&self, slot: u64, entry: &[u8]) {
        let Ok(()) = self.home.host.memory().write(self.table.entry_at(slot), entry);
    }

    fn assert_well(&mut self) {
        assert_eq!(value_of(&mut self.other, b"mine"), Ok(Some(b"untouched".to_vec())));
        assert_eq!(self.home.stat("other").live_buffers, 1, "the other store is unaffected");
    }
}

fn entry(inuse: u32, size: u32, ptr: u64, crc_item: u64) -> Entry {
    let mut entry = Entry {
        inuse: inuse.into(),
        size: size.into(),
        ptr: ptr.into(),
        crc_item: crc_item.into(),
        crc_entry: 0.into(),
    };
    entry.crc_entry = crc(&entry.as_bytes()[..ENTRY_SIZE as usize - 8]).into();
    entry
}

#[test]
fn a_torn_entry_is_reread_then_the_service_called_and_a_put_repairs_it() {
    let mut rig = Rig::new();
    let slot = rig.slot(&KEY);
    let good = entry_of(&rig.home, &rig.table, slot);
    let torn = Entry { size: 1000.into(), ..good };
    rig.spoil(slot, torn.as_bytes());
    rig.kv.fabric().take();
    assert!(matches!(value_of(&mut rig.kv, &KEY), Err(KvError::Damaged(_))));
    let costs = rig.kv.fabric().take();
    assert_eq!((costs.requests, costs.calls), (ATTEMPTS_MAX.into(), 1), "only entries were READ");
    assert!(matches!(go!(rig.kv, delete(&KEY)), Err(KvError::Damaged(_))), "the key may be present");
    rig.spoil(slot, good.as_bytes());
    assert_eq!(value_of(&mut rig.kv, &KEY), Ok(Some(b"value".to_vec())));
    rig.spoil(slot, torn.as_bytes());
    go!(rig.kv, put(&KEY, b"mended")).expect("stored");
    assert_eq!(value_of(&mut rig.kv, &KEY), Ok(Some(b"mended".to_vec())));
    rig.assert_well();
}

#[test]
fn a_wrong_entry_with_a_valid_crc_does_no_harm() {
    let mut rig = Rig::new();
    let slot = rig.slot(&KEY);
    let good = entry_of(&rig.home, &rig.table, slot);
    let mut theirs = [0; ENTRY_SIZE as usize];
    let other = Table::new(&rig.other_store.parameters, rig.other_store.extent()).expect("its parameters");
    let Ok(()) = rig
        .home
        .host
        .memory()
        .read(other.entry_at(other.probe(b"mine").next().expect("a slot")), &mut theirs);
    let theirs = Entry::read_from_bytes(&theirs).expect("an entry's size");
    let (size, at, crc_item) = (good.size.get(), good.ptr.get(), good.crc_item.get());
    // No item is READ with an impossible size, even if the entry's CRC is valid.
    for size in [u32::MAX, 1 << 31, ITEM_MAX as u32 + 1, 15, 0] {
        rig.spoil(slot, entry(IN_USE, size, at, crc_item).as_bytes());
        rig.kv.fabric().take();
        assert!(matches!(value_of(&mut rig.kv, &KEY), Err(KvError::Damaged(_))), "{size} bytes");
        assert_eq!(rig.kv.fabric().take().requests, 1, "{size} bytes");
    }
    rig.spoil(slot, entry(7, size, at, crc_item).as_bytes());
    assert!(matches!(value_of(&mut rig.kv, &KEY), Err(KvError::Damaged(_))), "an invalid inuse");
    // The node refuses addresses outside the store. For other addresses, the item's CRC is wrong.
    let nowhere =
        [0, 1, 64, u64::MAX, u64::MAX - 63, 1 << 63, (1 << 63) + 31, theirs.ptr.get(), u64::MAX >> 1];
    for ptr in nowhere {
        rig.spoil(slot, entry(IN_USE, size, ptr, crc_item).as_bytes());
        let got = value_of(&mut rig.kv, &KEY);
        let is_refused = matches!(got, Err(KvError::Refused(Status::Access) | KvError::Damaged(_)));
        assert!(is_refused, "{ptr:#x}: {got:?}");
    }
    for (size, ptr) in [(size, rig.table.entry_at(0)), (size, at + 16), (60_000, at), (size - 1, at)] {
        rig.spoil(slot, entry(IN_USE, size, ptr, crc_item).as_bytes());
        let got = value_of(&mut rig.kv, &KEY);
        let is_refused = matches!(got, Err(KvError::Refused(Status::Access) | KvError::Damaged(_)));
        assert!(is_refused, "{size} bytes at {ptr:#x}: {got:?}");
    }
    // The neighbour's entry in the key's slot: the item belongs to another key.
    let neighbour = entry_of(&rig.home, &rig.table, rig.slot(&NEIGHBOUR));
    rig.spoil(slot, neighbour.as_bytes());
    assert_eq!(value_of(&mut rig.kv, &KEY), Ok(None));
    // The neighbour's entry in all slots: the probe still ends.
    for every in 0..rig.table.spec.slots {
        rig.spoil(every, neighbour.as_bytes());
    }
    assert_eq!(value_of(&mut rig.kv, &KEY), Ok(None));
    assert!(matches!(go!(rig.kv, put(&KEY, b"x")), Err(KvError::TableFull(_))));
    rig.assert_well();
}

#[test]
fn with_any_bytes_in_the_table_operations_end_and_other_stores_are_unaffected() {
    let mut rig = Rig::new();
    let mut state = 1u64;
    let mut draw = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 20
    };
    let (at, end) = (rig.table.extent.at, rig.table.extent.at + 8 * (1 << 20));
    let mut ended = [0; 2];
    for _ in 0..3000 {
        let pointer = match draw() % 4 {
            0 => draw(),
            1 => rig.table.extent.at + draw() % (1 << 16) * 16,
            _ => at + draw() % ((end - at) / 16) * 16,
        };
        let sealed = entry((draw() % 4) as u32, (draw() % 200) as u32, pointer, draw());
        let bytes = match draw() % 3 {
            0 => [draw(), draw(), draw(), draw()].as_bytes().to_vec(),
            _ => sealed.as_bytes().to_vec(),
        };
        rig.spoil(draw() % rig.table.spec.slots, &bytes);
        if draw() % 16 == 0 {
            let Ok(()) = rig.home.host.memory().write(rig.table.head_at(), &bytes);
        }
        let key = (draw() % 64).to_be_bytes();
        let done = match draw() % 3 {
            0 => value_of(&mut rig.kv, &key).is_ok(),
            1 => go!(rig.kv, put(&key, &vec![1; [5, 39, 280][(draw() % 3) as usize]])).is_ok(),
            _ => go!(rig.kv, delete(&key)).is_ok(),
        };
        ended[usize::from(done)] += 1;
    }
    assert!(ended.iter().all(|&ended| ended > 100), "some operations succeed and some fail: {ended:?}");
    rig.home.ask(Ask::Scan { name: "s".into() });
    rig.assert_well();
}

#[test]
fn an_invalid_request_is_refused_with_a_reason_and_changes_nothing() {
    let rig = Rig::new();
    let key = rig.table.extent.key;
    let fabric = rig.kv.fabric();
    let ask = |asked: &[u8]| {
        let (mut request, mut answer) = (Vec::new(), Vec::new());
        let service = address(key, &mut request);
        request.extend_from_slice(asked);
        run(fabric, fabric.call(NodeId(0), service, &request, &mut answer)).map(|()| answer)
    };
    let long_key = [&[2, 0, 0x01, 0x10][..], &[b'k'; 0x1001]].concat();
    let too_long = [&[2, 0, 1, 0][..], &vec![b'k'; ITEM_MAX - 15]].concat();
    let hopeless: [&[u8]; 11] = [
        b"",
        &[1],
        &[1, 0, 1],
        &[0, 0, 1, 0, b'k'],
        &[4, 0, 1, 0, b'k'],
        &[1, 1, 1, 0, b'k'],
        &[1, 0, 0, 0],
        &[2, 0, 2, 0, b'k'],
        &[1, 0, 1, 0, b'k', b'v'],
        &long_key,
        &too_long,
    ];
    for asked in hopeless {
        let refused = ask(asked).expect_err("the request is invalid");
        let FabricError::Refused(reason) = refused else { panic!("{refused}") };
        assert!(reason.contains("use the same release on both sides"), "{reason}");
    }
    let answer = ask(&[&[1, 0, 8, 0][..], &KEY].concat()).expect("a valid request");
    let answer = Answer::decode(&answer).expect("an answer");
    assert_eq!((answer.outcome, answer.value), (Outcome::Done, &b"value"[..]));
    assert_eq!(rig.home.stat("s").live_buffers, 2);
}
