//! Tests of replicated blocks: what holds for each kind of block store, with real nodes that die; and, of PRISM-RS, the
//! scenarios of [`replicas`], costs and leaks.

use crate::support::Home;
use crate::support::intercept::Then;
use crate::support::kept::{Kept, step};
use crate::support::pool::{Fabric, NODES, Pool, run, serve};
use crate::support::replicas::{self, BLOCK, BLOCKS, Scene, Step};
use farside_fabrics::executor::block_on;
use farside_node::catalog::Division;
use farside_remote::NodeId;
use farside_remote::control::{Answer, Ask, StoreStat};
use farside_remote::draws::Draws;
use farside_remote::fabric::Ran;
use farside_remote::wire::{ChainHeader, OpHeader};
use farside_systems::blocks::prism_rs::KIND;
use farside_systems::blocks::prism_rs::layout::{Register, Tag, WRITERS_MAX, WriterId};
use farside_systems::blocks::{Blocks, BlocksError};
use farside_systems::members::{self, New};
use farside_systems::registry::{self, AnyBlocks};
use farside_systems::store::StoreError;
use farside_systems::system::{Family, Options, Sizing};
use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::{Duration, Instant};

const STORE: &str = "s";

/// Tests the scenarios of [`replicas`] that have these names.
macro_rules! scenarios {
    ($($name:ident),* $(,)?) => {
        $(#[test] fn $name() { replicas::$name(); })*
    };
}

scenarios![
    what_one_read_has_returned_the_next_returns_too,
    a_write_is_at_a_majority,
    a_replica_that_did_not_answer_does_not_count,
    a_replica_with_a_newer_block_counts,
    a_late_write_back_replaces_no_newer_block,
    a_write_after_a_dropped_one_has_another_tag,
    writes_of_two_clients_have_different_tags,
    two_clients_never_claim_one_id,
    a_refused_claim_waits_for_no_dead_replica,
    a_repeated_write_keeps_its_tag,
    without_a_majority_nothing_is_claimed,
];

#[test]
fn a_block_that_was_never_written_is_zeros() {
    let scene = Scene::new(3);
    let mut client = scene.client();
    assert_eq!((client.get(0), client.get(BLOCKS - 1)), (Ok(0), Ok(0)));
    scene.audit();
    assert_eq!(client.put(BLOCKS - 1, 9), Ok(()));
    assert_eq!((client.get(BLOCKS - 2), client.get(BLOCKS - 1)), (Ok(0), Ok(9)));
    let beyond = BlocksError::NoSuchBlock { block: BLOCKS, blocks: BLOCKS };
    assert_eq!((client.get(BLOCKS), client.put(BLOCKS, 1)), (Err(beyond.clone()), Err(beyond)));
    let mut short = [0; BLOCK - 1];
    let wrong = BlocksError::Length { len: BLOCK - 1, block: BLOCK };
    let reach = Rc::clone(&client.reach);
    let read = replicas::at_once(&reach, client.blocks.read(0, &mut short));
    assert_eq!(read, Err(wrong));
    scene.audit();
}

#[test]
fn two_clients_that_drop_operations_leak_no_buffer() {
    for replicas in [3, 5] {
        let scene = Scene::new(replicas);
        let mut clients = [scene.client(), scene.client()];
        let (mut draws, mut dropped) = (Draws(replicas as u64), 0);
        for turn in 0..1000 {
            let client = &mut clients[draws.below(2) as usize];
            let block = draws.below(8);
            // A random minority does not answer an install; a dropped put reaches at most a minority.
            let is_dropped = draws.once_in(4);
            let answering = if is_dropped { replicas / 2 } else { replicas / 2 + 1 };
            let first = draws.below(replicas as u64) as usize;
            client.before_each(move |node, step| {
                let is_reached = (node as usize + replicas - first) % replicas < answering;
                if step == Step::Installs && !is_reached { Then::Stops } else { Then::Runs }
            });
            if is_dropped {
                dropped += 1;
                client.drop_put(block, turn as u8);
            } else {
                assert_eq!(client.put(block, turn as u8), Ok(()));
                assert_eq!(client.get(block), Ok(turn as u8), "nobody else writes");
            }
        }
        assert!(dropped > 100);
        scene.audit();
    }
}

#[test]
fn two_tasks_of_a_client_never_share_a_tag() {
    let scene = Scene::new(3);
    let mut task = scene.client();
    let mut other = task.another();
    task.reaches(&[0, 1, 2], &[2]);
    task.drop_put(0, 1);
    task.reaches(&[0, 1], &[0, 1]);
    assert_eq!(other.put(0, 2), Ok(()));
    let (a, b) = (task.register(0, 0).tag, task.register(2, 0).tag);
    assert!(a.counter() > b.counter(), "{a:?} and {b:?}");
    for majority in [&[0, 1], &[1, 2], &[0, 2]] {
        assert_eq!(task.get_from(0, majority), 2);
    }
    scene.audit();
}

/// A client that holds the key writes the highest tag.
#[test]
fn the_highest_tag_stops_writes_of_its_block_alone() {
    let scene = Scene::new(3);
    let mut client = scene.client();
    assert_eq!(client.put(0, 1), Ok(()));
    let writer = WriterId::new(WRITERS_MAX.into()).expect("the highest id");
    let highest = (0..64).rev().find_map(|bits| Tag::new((1 << bits) - 1, writer)).expect("a tag");
    for replica in 0..3 {
        let before = client.register(replica, 0);
        client.overwrite(replica, 0, Register { tag: highest, ..before });
    }
    assert_eq!(client.get(0), Ok(1), "it can be read");
    let refused = client.put(0, 2).expect_err("no higher tag is left");
    assert!(matches!(refused, BlocksError::Damaged(_)) && refused.ran() == Ran::No, "{refused}");
    assert!(refused.to_string().contains("copy what can be read to another store"), "{refused}");
    assert_eq!(client.get(0), Ok(1));
    for block in 1..BLOCKS {
        assert_eq!(client.put(block, 3), Ok(()), "block {block}");
    }
    scene.audit();
}

/// The highest writer id is claimed, by a client of before or by one that holds the key and lies.
#[test]
fn a_store_without_writer_ids_is_read_and_says_so() {
    let scene = Scene::new(3);
    let mut client = scene.client();
    assert_eq!(client.put(0, 1), Ok(()));
    let ids = client.writer_ids().expect("a majority answers").expect("this kind counts its ids");
    assert_eq!((ids.claimed, ids.of, ids.are_scarce()), (1, WRITERS_MAX, false));
    for highest in [u64::from(WRITERS_MAX), u64::MAX] {
        (0..3).for_each(|replica| client.overwrite_highest_id(replica, highest));
        let mut other = scene.client();
        assert_eq!(other.put(0, 2), Err(BlocksError::NoWriterId(WRITERS_MAX)));
        assert_eq!((other.get(0), client.put(1, 3)), (Ok(1), Ok(())), "a client with an id goes on");
        let ids = other.writer_ids().expect("a majority answers").expect("this kind counts its ids");
        assert_eq!((ids.claimed, ids.are_scarce()), (WRITERS_MAX, true));
    }
    (0..3).for_each(|replica| client.overwrite_highest_id(replica, u64::from(WRITERS_MAX) - 1));
    let (mut last, mut late) = (scene.client(), scene.client());
    assert_eq!(last.put(2, 1), Ok(()));
    assert_eq!(late.put(2, 2), Err(BlocksError::NoWriterId(WRITERS_MAX)));
}

#[test]
fn a_replica_without_free_buffers_does_not_count() {
    // More blocks than buffers.
    let scene = Scene::sized(3, 10_000);
    let mut client = scene.client();
    client.reaches(&[0, 1, 2], &[0]);
    for block in 0..10_000 {
        client.drop_put(block, 1);
    }
    let stat = scene.homes[0].settled(STORE);
    assert!((1000..10_000).contains(&stat.live_buffers) && stat.free_buffers == 0, "{stat:?}");
    client.reaches(&[0, 1, 2], &[0, 1, 2]);
    assert_eq!(client.put(9999, 2), Ok(()), "two replicas have buffers");
    assert_eq!(client.get_from(9999, &[1, 2]), 2);
    client.before_each(|node, _| if node == 2 { Then::Lost(Ran::No) } else { Then::Runs });
    let error = client.put(9999, 3).expect_err("no majority has buffers");
    let BlocksError::NoMajority { answered: 1, needed: 2, reason, .. } = error else { panic!("{error}") };
    assert_eq!(*reason, BlocksError::OutOfMemory);
    scene.audit();
}

/// Runs a test with each kind of block store.
fn with_each_kind(test: impl Fn(&'static str)) {
    for system in registry::family(Family::Blocks) {
        println!("{}", system.kind);
        test(system.kind);
    }
}

#[test]
fn replicas_are_whole_and_odd_in_number() {
    with_each_kind(|kind| {
        let pool = Pool::start();
        let fabric = pool.fabric([0, 1, 2]);
        let refused = run(&fabric, members::create(&fabric, NODES as u32, &new(kind, 2), [1, 1]));
        let text = refused.expect_err("two replicas survive no loss").to_string();
        assert!(text.contains("an odd number of replicas, at most 5, and not 2"), "{text}");
        let fabric = pool.create(&new(kind, 3));
        let members = run(&fabric, members::open(&fabric, NODES as u32, STORE)).expect("the store");
        for member in members.list() {
            let store = member.store.as_ref().expect("it answers");
            assert_eq!(store.quota, QUOTA, "a replica has the whole quota");
            assert_eq!(store.parameters, members.store().parameters);
        }
    });
}

const QUOTA: u64 = 8 << 20;

fn new(kind: &str, members: usize) -> New {
    let sizing = Sizing { items: Some(BLOCKS), value_len: 4096, ..Sizing::default() };
    New { name: STORE.into(), kind: kind.into(), sizing, quota: QUOTA, members }
}

fn open(fabric: &Fabric, entropy: u64) -> Kept<Fabric> {
    run(fabric, Kept::open_in(Rc::clone(fabric), NODES as u32, STORE, entropy)).expect("the store")
}

fn put(fabric: &Fabric, blocks: &mut Kept<Fabric>, block: u64, fill: u8) -> Result<(), BlocksError> {
    run(fabric, blocks.write(block, &[fill; 4096]))
}

fn get(fabric: &Fabric, blocks: &mut Kept<Fabric>, block: u64) -> Result<u8, BlocksError> {
    let mut bytes = [0xee; 4096];
    run(fabric, blocks.read(block, &mut bytes))?;
    Ok(fill_of(&bytes))
}

/// Returns the byte that the whole block has.
fn fill_of(bytes: &[u8]) -> u8 {
    assert!(bytes.iter().all(|&byte| byte == bytes[0]), "the bytes are of one write");
    bytes[0]
}

/// An operation on the only block of a history: what it wrote or read, and the times of its call and its return.
#[derive(Clone, Copy, Debug)]
struct Event {
    is_write: bool,
    fill: u8,
    called: u64,
    returned: u64,
}

/// Checks that a history of one register, whose writes all differ, is linearizable (Gibbons and Korach, 1997). The
/// operations with one value form a zone, from their first return to their last call. If the first return comes before
/// the last call, the register has this value all the time in between; such zones must not overlap. Otherwise all of
/// them can take effect at one instant, which must not lie in a zone of the other sort as a whole.
fn check_register(history: &[Event]) {
    let zone = |fill: u8| {
        let of_it = || history.iter().filter(move |event| event.fill == fill);
        let write = of_it().find(|event| event.is_write).map_or(0, |write| write.called);
        assert!(of_it().all(|event| event.returned > write), "a value is read before it is written: {fill}");
        let start = of_it().map(|event| event.returned).min().expect("an operation");
        let start = if fill == 0 { 0 } else { start };
        let end = of_it().map(|event| event.called).max().expect("an operation");
        (start, end)
    };
    let mut fills: Vec<u8> = history.iter().map(|event| event.fill).collect();
    fills.sort_unstable();
    fills.dedup();
    let zones: Vec<(u64, u64)> = fills.into_iter().map(zone).collect();
    for (index, a) in zones.iter().enumerate() {
        for b in zones.iter().skip(index + 1) {
            let (forward, other) = if a.0 < a.1 { (a, b) } else { (b, a) };
            let is_bad = forward.0 < forward.1 && forward.0 < other.1 && other.0 < forward.1;
            assert!(!is_bad, "the zones {a:?} and {b:?} conflict: {history:?}");
        }
    }
}

#[test]
fn many_tasks_on_one_block_are_linearizable() {
    const TASKS: u8 = 8;
    const TURNS: u8 = 24;
    with_each_kind(|kind| {
        let pool = Pool::start();
        let fabric = pool.create(&new(kind, 3));
        let clients: Vec<Kept<Fabric>> = (0..TASKS).map(|task| open(&fabric, task.into())).collect();
        let (time, history) = (Cell::new(1), RefCell::new(Vec::new()));
        let now = || time.replace(time.get() + 1);
        let mut core = farside_fabrics::executor::Core::new(&**fabric.inner());
        for (task, mut client) in clients.into_iter().enumerate() {
            let (history, now) = (&history, &now);
            core.spawn(async move {
                for turn in 0..TURNS {
                    let is_write = turn % 3 == 0;
                    let fill = 1 + task as u8 * (TURNS / 3) + turn / 3;
                    let (mut bytes, called) = ([fill; 4096], now());
                    let done = match is_write {
                        true => client.write(0, &bytes).await,
                        false => client.read(0, &mut bytes).await,
                    };
                    assert_eq!(done, Ok(()));
                    let fill = fill_of(&bytes);
                    history.borrow_mut().push(Event { is_write, fill, called, returned: now() });
                }
                // The others may wait for what this client still has to do.
                client.linger(Duration::from_millis(100)).await;
            });
        }
        core.run();
        drop(core);
        let history = history.into_inner();
        assert_eq!(history.len(), usize::from(TASKS) * usize::from(TURNS));
        check_register(&history);
    });
}

#[test]
#[should_panic(expected = "conflict")]
fn a_stale_read_is_not_linearizable() {
    let event = |is_write, fill, called, returned| Event { is_write, fill, called, returned };
    check_register(&[
        event(true, 1, 1, 2),
        event(true, 2, 3, 4),
        event(false, 2, 5, 6),
        event(false, 1, 7, 8),
    ]);
}

#[test]
fn a_get_is_one_wave_or_two_and_a_put_two() {
    const CHAIN_HEADER: usize = size_of::<ChainHeader>();
    const OP_HEADER: usize = size_of::<OpHeader>();
    /// Bytes of the chains of each phase to one replica.
    const READ_PHASE: usize = CHAIN_HEADER + 3 * OP_HEADER + 8;
    const TAG_PHASE: usize = CHAIN_HEADER + OP_HEADER;
    const WRITE_PHASE: usize = CHAIN_HEADER + (OP_HEADER + 8) + (OP_HEADER + 8 + 4096) + (OP_HEADER + 8 + 32);
    let pool = Pool::start();
    let fabric = pool.create(&new(KIND, 3));
    let mut blocks = open(&fabric, 1);
    fabric.take();
    assert_eq!(put(&fabric, &mut blocks, 0, 1), Ok(()));
    assert_eq!(fabric.take().round_trips, 4, "the first put also claims an id, in two waves");
    for turn in 0..20 {
        assert_eq!(put(&fabric, &mut blocks, turn % 3, 2), Ok(()));
        let costs = fabric.take();
        assert_eq!((costs.round_trips, costs.requests, costs.calls), (2, 6, 0), "{costs:?}");
        assert_eq!(costs.bytes_out as usize, 3 * (TAG_PHASE + WRITE_PHASE), "{costs:?}");
        assert_eq!(get(&fabric, &mut blocks, turn % 3), Ok(2));
        let costs = fabric.take();
        // A put ends when two replicas have it. The third has it soon after.
        let write_back = costs.round_trips as usize - 1;
        assert!(write_back <= 1, "{costs:?}");
        assert_eq!(costs.bytes_out as usize, 3 * (READ_PHASE + write_back * WRITE_PHASE), "{costs:?}");
        assert!(costs.bytes_in >= 2 * 4096, "{costs:?}");
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(get(&fabric, &mut blocks, turn % 3), Ok(2));
        let costs = fabric.take();
        assert_eq!((costs.round_trips, costs.requests), (1, 3), "a majority has the block: {costs:?}");
    }
}

/// Polls a future up to `polls` times, each time after it was woken, and drops it.
async fn dropped_after(polls: u64, future: impl Future) {
    let (mut future, mut left) = (pin!(future), polls);
    std::future::poll_fn(|cx| {
        left = left.saturating_sub(1);
        match future.as_mut().poll(cx) {
            Poll::Pending if left > 0 => Poll::Pending,
            _ => Poll::Ready(()),
        }
    })
    .await;
}

#[test]
fn operations_dropped_at_any_await_leave_nothing_at_real_nodes() {
    with_each_kind(|kind| {
        let pool = Pool::start();
        let fabric = pool.create(&new(kind, 3));
        let (mut a, mut b) = (open(&fabric, 1), open(&fabric, 2));
        let mut draws = Draws(3);
        for turn in 0..1000u64 {
            let (block, polls, bytes) = (draws.below(8), 1 + draws.below(6), [turn as u8; 4096]);
            let mut into = [0; 4096];
            // Each client's task runs also while the other one waits for what an operation has left.
            match draws.below(4) {
                0 => run(&fabric, step(&mut b, dropped_after(polls, a.write(block, &bytes)))),
                1 => run(&fabric, step(&mut a, dropped_after(polls, b.write(block, &bytes)))),
                2 => run(&fabric, step(&mut b, dropped_after(polls, a.read(block, &mut into)))),
                _ => assert_eq!(run(&fabric, step(&mut a, b.write(block, &bytes))), Ok(())),
            }
        }
        let other = pool.fabric([2, 0, 1]);
        for block in 0..8 {
            let mut into = [0; 4096];
            assert_eq!(run(&fabric, step(&mut b, a.read(block, &mut into))), Ok(()));
            let one = fill_of(&into);
            assert_eq!(run(&fabric, step(&mut a, b.read(block, &mut into))), Ok(()));
            assert_eq!(fill_of(&into), one, "both clients read the same from block {block}");
        }
        run(&fabric, step(&mut b, a.linger(Duration::from_millis(20))));
        let mut c = open(&other, 3);
        for block in 0..8 {
            let one = get(&fabric, &mut a, block).expect("read");
            assert_eq!(get(&other, &mut c, block), Ok(one), "all clients read the same from block {block}");
        }
        drop((a, b, c, fabric, other));
        let system = registry::named(kind).expect("it is registered");
        let sizing = new(kind, 3).sizing;
        let has_buffers = (system.footprint)(&sizing).expect("it is possible").item_bytes > 0;
        for host in pool.hosts.iter().flatten() {
            let until = Instant::now() + Duration::from_secs(5);
            loop {
                let stat = stat(host);
                // Each of the eight blocks has a buffer, and no other block was written.
                if stat.retired_buffers == 0 && stat.live_buffers == if has_buffers { 8 } else { 0 } {
                    assert_eq!(stat.scans, 0, "no scan has cleaned the store");
                    break;
                }
                assert!(Instant::now() < until, "{stat:?}");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    });
}

fn stat(host: &farside_node::host::Host) -> StoreStat {
    match host.ask(Ask::StoreStat { name: STORE.into() }, Duration::from_secs(5)) {
        Ok(Answer::StoreStat(stat)) => stat,
        other => panic!("expected figures, got {other:?}"),
    }
}

#[test]
fn a_minority_may_die_and_a_wiped_replica_never_answers() {
    with_each_kind(|kind| {
        let mut pool = Pool::start();
        let fabric = pool.create(&new(kind, 3));
        let mut blocks = open(&fabric, 1);
        for block in 0..8 {
            assert_eq!(put(&fabric, &mut blocks, block, 1), Ok(()));
        }
        drop(pool.hosts[1].take());
        for block in 0..8 {
            assert_eq!(get(&fabric, &mut blocks, block), Ok(1));
            assert_eq!(put(&fabric, &mut blocks, block, 2), Ok(()), "two of three replicas live");
        }
        let mut late = open(&fabric, 2);
        assert_eq!(get(&fabric, &mut late, 0), Ok(2), "a store is opened without one of its replicas");

        // The node returns without its memory. It must not count: with another replica dead, only one is left.
        pool.hosts[1] = Some(serve(pool.ports[1]));
        for turn in 0..50 {
            assert_eq!(put(&fabric, &mut blocks, turn % 8, 3), Ok(()), "two of three replicas live");
            std::thread::sleep(Duration::from_millis(5));
        }
        drop(pool.hosts[2].take());
        for blocks in [&mut blocks, &mut late] {
            let since = Instant::now();
            let unread = get(&fabric, blocks, 0).expect_err("one replica is left");
            let unwritten = put(&fabric, blocks, 0, 4).expect_err("one replica is left");
            assert!(since.elapsed() < Duration::from_secs(5), "{:?}: {unread}", since.elapsed());
            for error in [unread, unwritten] {
                let is_expected = matches!(error, BlocksError::NoMajority { answered: 0 | 1, needed: 2, .. });
                assert!(is_expected && error.ran() == Ran::No, "{error:?}");
                println!("{error}");
            }
        }
        // The last but one replica returns without its memory as well: the store is lost.
        pool.hosts[2] = Some(serve(pool.ports[2]));
        let until = Instant::now() + Duration::from_secs(5);
        loop {
            let error = get(&fabric, &mut blocks, 0).expect_err("a majority has lost its memory");
            let BlocksError::NoMajority { reason, .. } = &error else { panic!("{error}") };
            if let BlocksError::Store(StoreError::MemoryLost { node: NodeId(1 | 2), .. }) = **reason {
                break;
            }
            assert!(Instant::now() < until, "{error}");
        }
    });
}

/// The reserve of a store takes no blocks, so it does not count as free.
#[test]
fn a_replica_holds_as_many_further_blocks_as_its_statistics_say() {
    for len in [512, 4096, 20_480] {
        let home = Home::new(16);
        let sizing = Sizing { items: Some(20_000), value_len: len, ..Sizing::default() };
        let system = registry::named(KIND).expect("it is registered");
        home.create_of(KIND, STORE, 4, &(system.parameters)(&sizing));
        let (endpoint, options) = (home.endpoint(), Options::default());
        let opened = AnyBlocks::open(Rc::clone(&endpoint), NodeId(0), STORE, &options);
        let mut blocks = block_on(&*endpoint, opened).expect("the store exists");
        let left = Division::buffers_left(&home.stat(STORE), len);
        let bytes = vec![7; len];
        let mut written = 0;
        while block_on(&*endpoint, blocks.write(written, &bytes)).is_ok() {
            written += 1;
            if written == left / 2 {
                assert_eq!(
                    Division::buffers_left(&home.stat(STORE), len),
                    left - written,
                    "blocks of {len} bytes"
                );
            }
        }
        assert_eq!(written, left, "blocks of {len} bytes");
        assert_eq!(Division::buffers_left(&home.stat(STORE), len), 0);
    }
}
