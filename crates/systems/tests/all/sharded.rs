//! Key-value stores over three nodes: every key at one member, in whatever order a client lists the nodes; several keys
//! in one round trip; and what a client sees when a node dies, or returns without its memory.

use crate::support::pool::{Fabric, NODES, Pool, run, serve};
use farside_remote::NodeId;
use farside_remote::fabric::Ran;
use farside_systems::kv::{AnyKv, Cursor, Item, Kv, KvError};
use farside_systems::members::{self, New};
use farside_systems::store::StoreError;
use farside_systems::system::{Options, Sizing};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

const KEYS: u32 = 300;
const STORE: &str = "s";
/// Maximum duration of an operation on a key of a dead node.
const KNOWN_DEAD: Duration = Duration::from_millis(10);

fn create(pool: &Pool, kind: &str, members: usize) -> Fabric {
    create_for(pool, kind, members, u64::from(KEYS) * 2)
}

fn create_for(pool: &Pool, kind: &str, members: usize, items: u64) -> Fabric {
    let sizing = Sizing { items: Some(items), ..Sizing::default() };
    pool.create(&New { name: STORE.into(), kind: kind.into(), sizing, quota: 24 << 20, members })
}

fn open(fabric: &Fabric) -> Result<AnyKv<Fabric>, StoreError> {
    run(fabric, AnyKv::open(Rc::clone(fabric), NODES as u32, STORE, &Options::default()))
}

fn key(number: u32) -> Vec<u8> {
    format!("key {number}").into_bytes()
}

fn value(number: u32) -> Vec<u8> {
    number.to_be_bytes().repeat(8)
}

fn fill(fabric: &Fabric, kv: &mut AnyKv<Fabric>) {
    for number in 0..KEYS {
        run(fabric, kv.put(&key(number), &value(number))).expect("stored");
    }
}

/// Whether a key has a value. A session that idled on a busy machine may be over, and is then opened again.
fn is_there(fabric: &Fabric, kv: &mut AnyKv<Fabric>, key: &[u8]) -> bool {
    let began = Instant::now();
    loop {
        match run(fabric, kv.contains(key)) {
            Ok(is_there) => return is_there,
            Err(KvError::Fabric(_)) if began.elapsed() < Duration::from_secs(10) => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn every_key_lies_at_one_member_whatever_the_order_of_the_nodes() {
    for kind in ["prism-kv", "pilaf"] {
        let pool = Pool::start();
        let fabric = create(&pool, kind, NODES);
        let mut kv = open(&fabric).expect("the store was created");
        fill(&fabric, &mut kv);
        let other = pool.fabric([2, 0, 1]);
        let mut other_kv = open(&other).expect("the same store");
        for number in 0..KEYS {
            let item = run(&other, other_kv.get(&key(number))).expect("read").expect("it was stored");
            assert_eq!(item.value, value(number), "{kind}, key {number}");
        }
        assert!(run(&other, other_kv.delete(&key(7))).expect("deleted"));
        assert!(!is_there(&fabric, &mut kv, &key(7)));
        let list = |fabric: &Fabric| {
            let opened = run(fabric, members::open(fabric, NODES as u32, STORE)).expect("the store");
            opened.list().iter().map(|member| member.node.0).collect::<Vec<u32>>()
        };
        assert_eq!((list(&fabric), list(&other)), (vec![0, 1, 2], vec![1, 2, 0]));
    }
}

#[test]
fn several_keys_of_all_members_take_the_round_trips_of_one_member() {
    let pool = Pool::start();
    // So many slots that keys hardly ever collide.
    let fabric = create_for(&pool, "prism-kv", NODES, 100_000);
    let mut kv = open(&fabric).expect("the store was created");
    // Members get random shares of the keys. So few keys fit into one chain for each member.
    let numbers: Vec<u32> = (0..30).collect();
    let keys: Vec<Vec<u8>> = numbers.iter().map(|&number| key(number)).collect();
    let values: Vec<Vec<u8>> = numbers.iter().map(|&number| value(number)).collect();
    // At most 16 keys fit into a chain that installs them.
    let items: Vec<(&[u8], &[u8])> =
        keys[..16].iter().zip(&values).map(|(key, value)| (&key[..], &value[..])).collect();
    fabric.take();
    run(&fabric, kv.put_many(&items)).expect("stored");
    let costs = fabric.take();
    // Round trips that overlap count as one.
    assert!(costs.round_trips <= 2, "{costs:?}");
    assert_eq!(costs.requests, 2 * NODES as u64, "{costs:?}: every member was asked twice");
    let asked: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
    let mut found = BTreeMap::new();
    let visit = |place: usize, item: Option<Item<'_>>| {
        assert!(found.insert(place, item.map(|item| item.value.to_vec())).is_none(), "visited once");
    };
    run(&fabric, kv.get_many(&asked, visit)).expect("read");
    let costs = fabric.take();
    assert_eq!(
        (costs.round_trips, costs.requests),
        (1, NODES as u64),
        "{costs:?}: every member was asked once"
    );
    for (place, value) in values.iter().enumerate() {
        assert_eq!(found[&place].as_ref(), Some(value).filter(|_| place < 16), "key {place}");
    }
}

#[test]
fn an_iteration_visits_the_keys_of_all_members_once() {
    let pool = Pool::start();
    let fabric = create(&pool, "prism-kv", NODES);
    let mut kv = open(&fabric).expect("the store was created");
    fill(&fabric, &mut kv);
    let (mut seen, mut cursor) = (BTreeMap::new(), Cursor::default());
    loop {
        let visit = |key: &[u8], item: Item<'_>| {
            assert!(seen.insert(key.to_vec(), item.value.to_vec()).is_none(), "visited twice");
        };
        if !run(&fabric, kv.next(&mut cursor, visit)).expect("visited") {
            break;
        }
        // Another process would continue at this place.
        if let Some(place) = cursor.place() {
            cursor = Cursor::at(place);
        }
    }
    assert_eq!(seen, (0..KEYS).map(|number| (key(number), value(number))).collect());
}

#[test]
fn a_dead_node_fails_its_own_keys_at_once_and_an_empty_one_has_lost_them() {
    let mut pool = Pool::start();
    let fabric = create(&pool, "prism-kv", NODES);
    let mut kv = open(&fabric).expect("the store was created");
    fill(&fabric, &mut kv);
    drop(pool.hosts[1].take());
    let (mut served, mut failed) = (0, 0);
    for number in 0..KEYS {
        let since = Instant::now();
        match run(&fabric, kv.get(&key(number))) {
            Ok(item) => {
                assert!(item.is_some_and(|item| item.value == value(number)), "key {number}");
                served += 1;
            }
            Err(error) => {
                let took = since.elapsed();
                let text = error.to_string();
                assert!(text.contains("node 1"), "the error names the node: {text}");
                assert_eq!(error.ran(), Ran::No, "{text}");
                assert!(failed == 0 || took < KNOWN_DEAD, "{took:?}: {text}");
                failed += 1;
            }
        }
    }
    assert!(served > KEYS / 2 && failed > KEYS / 6, "{served} served, {failed} failed");
    println!("{served} keys of living nodes served, {failed} keys of the dead node failed at once");

    // A store is opened although one of its members is down.
    let mut late = open(&fabric).expect("two members answer");
    let answers = |kv: &mut AnyKv<Fabric>| {
        (0..KEYS).map(|n| run(&fabric, kv.get(&key(n))).map(|item| item.is_some())).collect::<Vec<_>>()
    };
    assert!(answers(&mut late).iter().all(|answer| !matches!(answer, Ok(false))));

    // The node returns with another memory: its keys are lost, and never merely absent.
    pool.hosts[1] = Some(serve(pool.ports[1]));
    let until = Instant::now() + Duration::from_secs(5);
    for kv in [&mut kv, &mut late] {
        loop {
            let answers = answers(kv);
            assert!(
                answers.iter().all(|answer| !matches!(answer, Ok(false))),
                "a key of a wiped node is absent"
            );
            let lost = |answer: &&Result<bool, KvError>| {
                matches!(answer, Err(KvError::Store(StoreError::MemoryLost { node: NodeId(1), .. })))
            };
            let lost = answers.iter().filter(lost).count();
            if lost == failed as usize {
                break;
            }
            assert!(Instant::now() < until, "{lost} of {failed} keys are reported as lost: {answers:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    let lost = open(&fabric).map(|mut kv| answers(&mut kv));
    assert!(
        lost.is_ok_and(|answers| answers.iter().all(|answer| !matches!(answer, Ok(false)))),
        "a new client sees no absent key"
    );
}

#[test]
fn a_store_on_one_node_of_several_is_found() {
    let pool = Pool::start();
    let fabric = create(&pool, "prism-kv", 1);
    let mut kv = open(&fabric).expect("the store was created");
    fill(&fabric, &mut kv);
    let item = run(&fabric, kv.get(&key(3))).expect("read").expect("it was stored");
    assert_eq!(item.value, value(3));
    let nobody = run(&fabric, AnyKv::open(Rc::clone(&fabric), NODES as u32, "other", &Options::default()));
    assert!(
        matches!(nobody.err(), Some(StoreError::Gone(reason)) if reason.contains("there is no store 'other'"))
    );
}
