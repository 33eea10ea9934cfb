//! Tests of the fabric whose chains a NIC executes: statuses, keys, refusals, words of the NIC, and what is left of a
//! list when its client or the node dies.

use farside_remote::control::{Answer, Ask, Store};
use farside_remote::fabric::Ran;
use farside_remote::op::{ListId, cas_with};
use farside_remote::service::{Extent, Kind, Plan, Service};
use farside_remote::{
    Addr, Capabilities, ChainBuf, Fabric, FabricError, Key, Memory, Mode, NodeId, Reply, Status, allocate,
    cas, fetch_add, read, read_as, retire, write,
};
use farside_sim::clock::ProcessClock;
use farside_sim::fabric::session::Identity;
use farside_sim::fabric::verbs::Verbs;
use farside_sim::fault::{FaultRates, Struck, Target};
use farside_sim::hardware::{INPUTS, Testbed};
use farside_sim::network::{HostId, Network, Wire};
use farside_sim::nic::{Device, Sender, Timing};
use farside_sim::node::{Kinds, Node, Options};
use farside_sim::world::{MICROS, MILLIS, ProcessId, SECONDS, World};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::future::Future;
use std::rc::Rc;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// A kind of store that has a table and no service.
pub(super) struct Plain;

impl<M: Memory> Kind<M> for Plain {
    fn name(&self) -> &'static str {
        "plain"
    }

    fn plan(&self, parameters: &str, _quota: u64, _entropy: u64) -> Result<Plan, String> {
        Ok(Plan { table_len: 1 << 16, parameters: parameters.to_owned(), wide: parameters == "wide" })
    }

    fn serve(&self, _parameters: &str, _table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Ok(Box::new(Plain))
    }
}

impl<M: Memory> Service<M> for Plain {
    fn live(&self, _memory: &M, _cursor: u64, _found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        Ok(None)
    }
}

const NODE: NodeId = NodeId(0);
/// Lines land slowly, so that a death can strike within a WRITE.
const SLOW: Timing = Timing {
    fetch_spread_ns: 200,
    land_spread_ns: 400,
    slot_spread_ns: 100,
    ..INPUTS.timing(Testbed::PRISM_MICRO)
};
const DEVICE: Device = Device { timing: SLOW, has_masked_cas: true, has_on_chip_words: true };

/// A node with a NIC, its stores, and a host for clients.
struct Bench {
    world: World,
    network: Network,
    node: Node,
    host: HostId,
    sender: Rc<Sender>,
    incarnations: Cell<u64>,
}

impl Bench {
    fn new(seed: u64, device: Device) -> Rc<Bench> {
        let world = World::new(seed);
        let struck = Rc::new(Struck::default());
        let network = Network::new(&world, Wire { delay_ns: 2 * MICROS, jitter_ns: 500 }, &struck);
        let at = network.add_host();
        let options = Options { engines: 1, is_reliable: true, nic: Some(device), ..Options::default() };
        let kinds: Kinds = Rc::new(|| vec![Box::new(Plain) as Box<_>]);
        let node = Node::start(&world, &network, at, NODE, kinds, options);
        let host = network.add_host();
        let sender = Rc::new(INPUTS.sender());
        Rc::new(Bench { world, network, node, host, sender, incarnations: Cell::new(0) })
    }

    /// Runs a test to its end, in virtual time.
    fn run<T: 'static>(seed: u64, device: Device, test: impl AsyncFnOnce(Rc<Bench>) -> T + 'static) -> T {
        let bench = Bench::new(seed, device);
        let theirs = Rc::clone(&bench);
        let done = bench.world.complete(20 * SECONDS, async move { test(theirs).await });
        bench.world.end();
        done.expect("the test ends")
    }

    async fn create(&self, name: &str, parameters: &str) {
        let (name, parameters) = (name.to_owned(), parameters.to_owned());
        let ask = Ask::CreateStore { name, kind: "plain".to_owned(), parameters, quota: 4 << 20 };
        self.node.answer(ask).await.expect("the node has enough memory");
    }

    /// Opens an endpoint. A client's next endpoint ends its previous one.
    async fn open(&self, process: ProcessId, client: u128) -> Result<Rc<Verbs>, FabricError> {
        let incarnation = self.incarnations.get() + 1;
        self.incarnations.set(incarnation);
        let identity = Identity { identity: client, incarnation, silence: 60 * MILLIS };
        let clock = ProcessClock::new(&self.world, 0, self.network.struck(), Target::Client(0));
        Verbs::open(&self.node, 0, process, self.host, &clock, identity, &self.sender).await
    }

    /// Opens an endpoint in a process of its own.
    async fn connect(&self) -> Rc<Verbs> {
        self.connect_as(7).await
    }

    async fn connect_as(&self, client: u128) -> Rc<Verbs> {
        self.open(self.world.start_process(), client).await.expect("the node responds")
    }

    fn peek(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.node.memory().peek(at, &mut bytes);
        bytes
    }
}

/// Opens a store over the fabric. Returns the session's key and the address of the store's table.
async fn open_store(verbs: &Verbs, name: &str) -> (Key, u64) {
    let ask = serde_json::to_vec(&Ask::OpenStore { name: name.to_owned() }).expect("plain data");
    let mut answer = Vec::new();
    verbs.call(NODE, farside_remote::fabric::ServiceId::NODE, &ask, &mut answer).await.expect("it exists");
    let Ok(Answer::Store(store)) = serde_json::from_slice::<Answer>(&answer) else {
        panic!("{}", String::from_utf8_lossy(&answer))
    };
    let Store { table_at, .. } = store;
    (store.extent().key, table_at)
}

#[test]
fn a_chain_of_verbs_returns_the_outputs_and_statuses_of_its_ops() {
    Bench::run(1, DEVICE, async |bench: Rc<Bench>| {
        bench.create("s", "").await;
        let verbs = bench.connect().await;
        let (key, at) = open_store(&verbs, "s").await;
        let (mut buf, mut reply) = (ChainBuf::new(), Reply::new());
        let (bytes, one, [two, three]) = ([7; 300], U64::new(1), [2u64, 3]);
        let mut chain = buf.begin(key);
        let wrote = chain.also(write(Addr::new(at + 20), &bytes));
        let added = chain.also(fetch_add(Addr::new(at), &one));
        let swapped = chain.also(cas(Mode::Eq, Addr::new(at), &1u64, &two).fenced());
        let failed = chain.also(cas(Mode::Eq, Addr::new(at), &1u64, &three).fenced());
        let word = chain.also(read_as::<U64>(Addr::new(at)).fenced());
        let copy = chain.also(read(Addr::new(at + 20), 300));
        verbs.run(NODE, &chain, &mut reply).await.expect("it runs");
        assert_eq!(reply.statuses().collect::<Vec<_>>()[..], {
            use Status::{CasFailed, Ok};
            [Ok, Ok, Ok, CasFailed, Ok, Ok]
        });
        assert_eq!(reply.status(wrote), Status::Ok);
        assert_eq!(reply.get(added).map(|old| old.get()), Ok(0));
        assert_eq!(reply.output(2), 1u64.to_le_bytes());
        assert_eq!(reply.output(3), 2u64.to_le_bytes());
        assert_eq!((reply.status(swapped), reply.status(failed)), (Status::Ok, Status::CasFailed));
        assert_eq!(reply.get(word).map(|word| word.get()), Ok(2));
        assert_eq!(reply.get(copy), Ok(&bytes[..]));

        // The masked CAS compares the low byte, and swaps the high one.
        let mut chain = buf.begin(key);
        let (low, high, compare, swap) = (0xffu64, 0xffu64 << 56, 0x5502u64, 0x99u64 << 56);
        chain.also(cas(Mode::Eq, Addr::new(at), &compare, &swap).masked(&low, &high));
        verbs.run(NODE, &chain, &mut reply).await.expect("it runs");
        assert_eq!(reply.verdict(), Status::Ok);
        assert_eq!(bench.peek(at, 8), (2u64 | 0x99 << 56).as_bytes());
    });
}

#[test]
fn a_refused_access_does_nothing_and_aborts_the_rest_of_its_list() {
    Bench::run(2, DEVICE, async |bench: Rc<Bench>| {
        bench.create("s", "").await;
        bench.create("other", "").await;
        bench.create("wide", "wide").await;
        let verbs = bench.connect().await;
        let (key, at) = open_store(&verbs, "s").await;
        let (other, other_at) = open_store(&verbs, "other").await;
        let (wide, wide_at) = open_store(&verbs, "wide").await;
        let (mut buf, mut reply) = (ChainBuf::new(), Reply::new());
        let guessed = Key::new(key.region(), key.secret() ^ 1);
        let cases = [
            (guessed, at, Status::Access),
            (other, at, Status::Access),
            (key, other_at, Status::Access),
            (key, at + (1 << 20) - 16, Status::Access),
            (key, 8, Status::Access),
            (key, u64::MAX >> 2, Status::Access),
            (key, Addr::on_chip(1 << 20).raw(), Status::Access),
            (wide, wide_at, Status::Access),
        ];
        for (key, place, refused) in cases {
            let mut chain = buf.begin(key);
            chain.also(write(Addr::new(place), &[9; 32]));
            chain.also(write(Addr::new(at), &[9; 8]));
            chain.also(read(Addr::new(at), 8));
            verbs.run(NODE, &chain, &mut reply).await.expect("it runs");
            let statuses: Vec<_> = reply.statuses().collect();
            assert_eq!(statuses, [refused, Status::Aborted, Status::Aborted], "{place:#x}");
        }
        assert_eq!(bench.peek(at, 8), [0; 8], "nothing was written");
        let mut chain = buf.begin(key);
        chain.also(write(Addr::new(at), &[1; 8]));
        chain.also(fetch_add(Addr::new(at + 4), &U64::ZERO));
        chain.also(write(Addr::new(at), &[2; 8]));
        verbs.run(NODE, &chain, &mut reply).await.expect("it runs");
        let statuses: Vec<_> = reply.statuses().collect();
        assert_eq!(statuses, [Status::Ok, Status::Invalid, Status::Aborted]);
        let mut chain = buf.begin(key);
        chain.also(read(Addr::new(at), 60_000));
        chain.also(read(Addr::new(at), 6_000));
        chain.also(read(Addr::new(at), 0));
        verbs.run(NODE, &chain, &mut reply).await.expect("it runs");
        let statuses: Vec<_> = reply.statuses().collect();
        assert_eq!(statuses, [Status::Ok, Status::TooLong, Status::Ok]);

        // A revoked key opens nothing any more.
        bench.node.answer(Ask::DropStore { name: "s".to_owned() }).await.expect("it exists");
        let mut chain = buf.begin(key);
        chain.also(read(Addr::new(at), 8));
        verbs.run(NODE, &chain, &mut reply).await.expect("it runs");
        assert_eq!(reply.verdict(), Status::Access);
    });
}

#[test]
fn a_chain_with_an_op_that_the_nic_lacks_is_refused_before_its_first_op() {
    let bare = Device { has_masked_cas: false, has_on_chip_words: false, ..DEVICE };
    Bench::run(3, bare, async |bench: Rc<Bench>| {
        bench.create("s", "").await;
        let verbs = bench.connect().await;
        assert_eq!(verbs.capabilities(NODE), Capabilities::CALLS.and(Capabilities::WHOLE_LINES));
        let (key, at) = open_store(&verbs, "s").await;
        let place = Addr::new(at);
        let (mut buf, mut reply, garbage) = (ChainBuf::new(), Reply::new(), [place]);
        let (zero, wide) = (0u64, [0u64; 2]);
        for case in 0..12 {
            let mut chain = buf.begin(key);
            chain.also(write(place, &[9; 8]));
            match case {
                0 => _ = chain.then(write(place, &[9; 8])),
                1 => _ = chain.also(read(place, 8).indirect()),
                2 => _ = chain.also(read(place, 8).indirect().bounded()),
                3 => _ = chain.also(read(place, 8).redirect(place)),
                4 => _ = chain.also(allocate(ListId(3), [b"new", &[], &[]])),
                5 => _ = chain.also(retire(&garbage)),
                6 => _ = chain.also(cas(Mode::Eq, place, &wide, &wide)),
                7 => _ = chain.also(cas(Mode::Ge, place, &zero, &zero)),
                8 => _ = chain.also(cas(Mode::Eq, place, &zero, &zero).masked(&zero, &zero)),
                9 => _ = chain.also(cas_with::<u64>(Mode::Eq, place, Addr::scratch(0))),
                10 => _ = chain.also(read(Addr::scratch(0), 8)),
                _ => _ = chain.also(read(Addr::on_chip(0), 8)),
            }
            let error = verbs.run(NODE, &chain, &mut reply).await.expect_err("the NIC lacks it");
            assert_eq!(error.ran(), Ran::No);
            let text = error.to_string();
            assert!(text.starts_with("chain refused: the NIC of node 0 cannot execute op 1, "), "{text}");
        }
        assert_eq!(bench.peek(at, 8), [0; 8]);
    });
}

#[test]
fn a_stores_words_in_the_nic_start_as_zeros_and_belong_to_its_key_alone() {
    Bench::run(4, DEVICE, async |bench: Rc<Bench>| {
        bench.create("a", "").await;
        bench.create("b", "").await;
        let verbs = bench.connect().await;
        let all = Capabilities::CALLS
            .and(Capabilities::MASKED_CAS)
            .and(Capabilities::ON_CHIP_WORDS)
            .and(Capabilities::WHOLE_LINES);
        assert_eq!(verbs.capabilities(NODE), all);
        let (a, _) = open_store(&verbs, "a").await;
        let (b, _) = open_store(&verbs, "b").await;
        let (mut buf, mut reply, one) = (ChainBuf::new(), Reply::new(), U64::new(1));
        for (key, expected) in [(a, 0), (b, 0), (a, 1), (b, 1), (a, 2)] {
            let mut chain = buf.begin(key);
            let old = chain.also(fetch_add(Addr::on_chip(1016), &one));
            verbs.run(NODE, &chain, &mut reply).await.expect("it runs");
            assert_eq!(reply.get(old).map(|old| old.get()), Ok(expected));
        }
        bench.node.answer(Ask::DropStore { name: "a".to_owned() }).await.expect("it exists");
        bench.world.sleep(20 * MILLIS).await;
        bench.create("c", "").await;
        let (c, _) = open_store(&verbs, "c").await;
        assert_eq!(c.region(), a.region(), "the region is used again");
        let mut chain = buf.begin(c);
        let old = chain.also(fetch_add(Addr::on_chip(1016), &one));
        verbs.run(NODE, &chain, &mut reply).await.expect("it runs");
        assert_eq!(reply.get(old).map(|old| old.get()), Ok(0), "another store's words are not seen");
    });
}

/// Polls a future once, and drops it.
async fn polled_once(future: impl Future) {
    let mut future = std::pin::pin!(future);
    std::future::poll_fn(|cx| {
        let _pending = future.as_mut().poll(cx);
        std::task::Poll::Ready(())
    })
    .await;
}

#[test]
fn a_list_whose_future_is_dropped_takes_effect_once() {
    Bench::run(5, DEVICE, async |bench: Rc<Bench>| {
        bench.create("s", "").await;
        let verbs = bench.connect().await;
        let (key, at) = open_store(&verbs, "s").await;
        let (mut buf, mut reply, one) = (ChainBuf::new(), Reply::new(), U64::new(1));
        let mut chain = buf.begin(key);
        chain.also(write(Addr::new(at + 8), &[5; 200]));
        chain.also(fetch_add(Addr::new(at), &one));
        polled_once(verbs.run(NODE, &chain, &mut reply)).await;
        bench.world.sleep(MILLIS).await;
        assert_eq!(bench.peek(at, 8), 1u64.to_le_bytes());
        assert_eq!(bench.peek(at + 8, 200), [5; 200]);
    });
}

/// Lines of the WRITE of a list that a death cuts.
const LINES: usize = 4;

/// An endpoint with the key and the table's address of a store.
type Opened = (Rc<Verbs>, Key, u64);

/// Kills the client or the node while a list of a WRITE and a FETCH-ADD is executed, and returns what is left: the
/// number of lines written, and the word. Asserts that what is left is a prefix of the list.
fn left_after_death(seed: u64, kills_node: bool) -> (usize, u64) {
    Bench::run(seed, DEVICE, async move |bench: Rc<Bench>| {
        bench.create("s", "").await;
        let process = bench.world.start_process();
        let found: Rc<RefCell<Option<Opened>>> = Rc::default();
        let (theirs, opened) = (Rc::clone(&bench), Rc::clone(&found));
        bench.world.spawn(process, async move {
            let verbs = theirs.open(process, 7).await.expect("the node responds");
            let (key, at) = open_store(&verbs, "s").await;
            *opened.borrow_mut() = Some((Rc::clone(&verbs), key, at));
            let (mut buf, mut reply, one) = (ChainBuf::new(), Reply::new(), U64::new(1));
            let bytes = [1; 64 * LINES];
            let mut chain = buf.begin(key);
            chain.also(write(Addr::new(at), &bytes));
            chain.also(fetch_add(Addr::new(at + 1024), &one));
            let ran = verbs.run(NODE, &chain, &mut reply).await;
            assert!(ran.as_ref().err().is_none_or(|error| error.ran() != Ran::No), "{ran:?}");
        });
        while found.borrow().is_none() {
            bench.world.sleep(100).await;
        }
        let memory = bench.node.memory();
        bench.world.sleep(bench.world.random().below(6 * MICROS)).await;
        if kills_node {
            bench.node.kill();
        } else {
            bench.world.kill(process);
        }
        bench.world.sleep(2 * MILLIS).await;
        let (_, _, at) = found.take().expect("it was opened");
        let mut bytes = [0; 64 * LINES];
        memory.peek(at, &mut bytes);
        let lines = bytes.chunks(64).take_while(|line| **line == [1; 64]).count();
        assert!(bytes[64 * lines..].iter().all(|byte| *byte == 0), "lines land whole and in order");
        let mut word = [0; 8];
        memory.peek(at + 1024, &mut word);
        let word = u64::from_le_bytes(word);
        assert!(word == 0 || lines == LINES, "the atomic comes after the WRITE");
        (lines, word)
    })
}

#[test]
fn a_death_cuts_a_list_between_any_two_verbs_and_lines() {
    for kills_node in [false, true] {
        let left: BTreeSet<_> = (0..150).map(|seed| left_after_death(seed, kills_node)).collect();
        let all: BTreeSet<_> = (0..=LINES).map(|lines| (lines, 0)).chain([(LINES, 1)]).collect();
        assert_eq!(left, all, "kills the node: {kills_node}");
    }
}

/// Runs a READ of four lines while another client WRITEs them, if `is_written`. Returns the READ's lines, by the value
/// of their bytes, and the number of torn READs that the node has counted.
fn read_during_a_write(seed: u64, is_written: bool) -> ([u8; LINES], u64) {
    Bench::run(seed, DEVICE, async move |bench: Rc<Bench>| {
        bench.create("s", "").await;
        let [reader, writer] = [bench.connect_as(7).await, bench.connect_as(8).await];
        let (key, at) = open_store(&reader, "s").await;
        let (writes, _) = open_store(&writer, "s").await;
        let before = bench.node.seen().torn_reads;
        let theirs = Rc::clone(&bench);
        bench.world.spawn(bench.world.start_process(), async move {
            theirs.world.sleep(theirs.world.random().below(MICROS / 2)).await;
            let (mut buf, mut reply, bytes) = (ChainBuf::new(), Reply::new(), [1; 64 * LINES]);
            let mut chain = buf.begin(writes);
            chain.also(write(Addr::new(at), &bytes));
            if is_written {
                writer.run(NODE, &chain, &mut reply).await.expect("it runs");
            }
        });
        bench.world.sleep(bench.world.random().below(MICROS / 2)).await;
        let (mut buf, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buf.begin(key);
        let found = chain.also(read(Addr::new(at), 64 * LINES as u32));
        reader.run(NODE, &chain, &mut reply).await.expect("it runs");
        let mut lines = [0; LINES];
        for (line, bytes) in lines.iter_mut().zip(reply.get(found).expect("it is read").chunks(64)) {
            assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a line is copied at one instant");
            *line = bytes[0];
        }
        (lines, bench.node.seen().torn_reads - before)
    })
}

#[test]
fn a_read_is_counted_as_torn_once_if_a_write_lands_between_its_lines() {
    let (mut mixed, mut torn) = (0, 0);
    for seed in 0..400 {
        let (lines, counted) = read_during_a_write(seed, true);
        assert!(counted <= 1, "seed {seed}: one READ is counted {counted} times");
        // Lines land in ascending order, so the memory never had an old line before a new one.
        if lines.windows(2).any(|pair| pair[0] < pair[1]) {
            assert_eq!(counted, 1, "seed {seed}: {lines:?} is torn");
            mixed += 1;
        }
        if lines == [0; LINES] {
            assert_eq!(counted, 0, "seed {seed}: nothing had landed yet");
        }
        torn += counted;
    }
    println!("{torn} of 400 READs are torn, {mixed} of them mix old and new lines out of order");
    assert!(mixed >= 5 && torn >= mixed && torn < 300, "{mixed} mixed, {torn} torn");
    for seed in 0..10 {
        assert_eq!(read_during_a_write(seed, false), ([0; LINES], 0), "nothing is written");
    }
}

#[test]
fn a_node_that_loses_its_memory_frees_it_although_clients_and_lists_are_left() {
    Bench::run(4, DEVICE, async |bench: Rc<Bench>| {
        bench.create("s", "").await;
        let verbs = bench.connect().await;
        let (key, at) = open_store(&verbs, "s").await;
        let theirs = Rc::clone(&verbs);
        bench.world.spawn(bench.world.start_process(), async move {
            let (mut buf, mut reply, one) = (ChainBuf::new(), Reply::new(), U64::new(1));
            let mut chain = buf.begin(key);
            chain.also(fetch_add(Addr::new(at), &one));
            chain.also(read(Addr::new(at), 4096));
            theirs.run(NODE, &chain, &mut reply).await.expect_err("the node dies");
        });
        // The NIC has received the list, and has not carried it out.
        bench.world.sleep(4 * MICROS).await;
        let memory = Rc::downgrade(&bench.node.memory());
        bench.node.lose_memory();
        assert!(memory.upgrade().is_none(), "{} owners are left", memory.strong_count());
        bench.world.sleep(MILLIS).await;
        assert!(verbs.is_over(), "the session has ended");
    });
}

#[test]
fn a_broken_connection_ends_the_endpoint_with_an_unknown_outcome() {
    Bench::run(6, DEVICE, async |bench: Rc<Bench>| {
        bench.create("s", "").await;
        let verbs = bench.connect().await;
        let (key, at) = open_store(&verbs, "s").await;
        bench.network.set_fault_rates(FaultRates { reset_one_in: 1, ..FaultRates::NONE });
        let (mut buf, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buf.begin(key);
        chain.also(write(Addr::new(at), &[1; 8]));
        let error = verbs.run(NODE, &chain, &mut reply).await.expect_err("the connection broke");
        assert_eq!(error.ran(), Ran::Unknown, "{error}");
        let error = verbs.run(NODE, &chain, &mut reply).await.expect_err("the session is over");
        assert_eq!(error.ran(), Ran::No, "{error}");
        bench.network.set_fault_rates(FaultRates::NONE);
        let again = bench.connect().await;
        let (key, at) = open_store(&again, "s").await;
        let mut chain = buf.begin(key);
        chain.also(write(Addr::new(at), &[2; 8]));
        again.run(NODE, &chain, &mut reply).await.expect("the next session works");
        assert_eq!(bench.peek(at, 8), [2; 8]);
    });
}
