//! Steps of Chequer's clients and service in an order that the tests determine: puts in mode 2 between other
//! operations, sessions that end, records that a client forges, and restarts with the log.

use crate::support::Home;
use crate::support::intercept::{Intercept, Then};
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::block_on;
use farside_fabrics::local::{self, LocalNode};
use farside_fabrics::memory::{Mapping, MappingError, Pages};
use farside_node::host::{LogFolder, Options};
use farside_node::log::{LogOptions, SyncPolicy};
use farside_remote::control::Store;
use farside_remote::draws::Draws;
use farside_remote::fabric::DEADLINE;
use farside_remote::service::{Call, Context as Work, Extent, Kind, Plan, Records, Service, address};
use farside_remote::{Addr, ChainBuf, Fabric, Key, Memory, NodeId, Reply, Rights, read, write};
use farside_systems::kv::chequer::layout::{
    Block, Bucket, RECORD_SIZE, Record, Stamp, Table, Used, crc_of, put_block, value_in,
};
use farside_systems::kv::chequer::log::{Logged, begin_put, last, put_delete, put_last};
use farside_systems::kv::chequer::pool::QUARANTINE;
use farside_systems::kv::chequer::request::{Answer, Outcome, PART_MAX, Request, number_in};
use farside_systems::kv::chequer::service::RESERVATIONS_MAX;
use farside_systems::kv::chequer::{Chequer, ChequerKind, KIND, MESSAGE_KIND};
use farside_systems::kv::{Kv, KvError};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::path::Path;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

const NODE: NodeId = NodeId(0);
const PATIENCE: Duration = Duration::from_secs(30);

/// A client of the store `s`, and its session, over which the tests make single requests.
struct Client {
    session: Rc<Direct>,
    store: Store,
    table: Table,
    kv: Chequer<Rc<Direct>>,
    /// Number of blocks that a test has reserved.
    reserved: Cell<u64>,
}

/// An answer of the service, without its value.
#[derive(Debug)]
struct Answered {
    outcome: Outcome,
    stamp: Stamp,
    second: u64,
}

impl Client {
    fn new(home: &Home) -> Client {
        Client::caching(home, 0)
    }

    fn caching(home: &Home, bytes: usize) -> Client {
        let session = local(home);
        let opened = block_on(&session, Chequer::open(Rc::clone(&session), NODE, "s"));
        Client::of(session, opened.expect("the store exists"), bytes)
    }

    fn message(home: &Home) -> Client {
        let session = local(home);
        let opened = block_on(&session, Chequer::open_message(Rc::clone(&session), NODE, "s"));
        Client::of(session, opened.expect("the store exists"), 0)
    }

    fn of(session: Rc<Direct>, kv: Chequer<Rc<Direct>>, bytes: usize) -> Client {
        let store = kv.store().clone();
        let table = Table::new(&store.parameters, store.extent()).expect("its own parameters");
        Client { session, store, table, kv: kv.with_cache(bytes), reserved: Cell::new(0) }
    }

    fn ask(&self, request: Request<'_>) -> Answered {
        self.ask_whole(request).0
    }

    /// Makes a call. Returns the answer and its value.
    fn ask_whole(&self, request: Request<'_>) -> (Answered, Vec<u8>) {
        let (mut bytes, mut answer) = (Vec::new(), Vec::new());
        let service = address(self.store.extent().key, &mut bytes);
        request.encode(&mut bytes);
        let called = block_on(&self.session, self.session.call(NODE, service, &bytes, &mut answer));
        called.unwrap_or_else(|error| panic!("{request:?}: {error}"));
        let Answer { outcome, stamp, second, value, .. } = Answer::decode(&answer).expect("an answer");
        (Answered { outcome, stamp, second }, value.to_vec())
    }

    /// Reserves a block. Returns its number and address.
    fn reserve(&self, key: &[u8], value: &[u8]) -> (u64, u64) {
        self.reserved.set(self.reserved.get() + 1);
        // Not a number that the client itself chooses.
        let number = number_in(self.table.home(key).partition, 1 << 40 | self.reserved.get());
        let Answered { outcome, second, .. } = self.ask_to_reserve(number, key, value);
        assert_eq!(outcome, Outcome::Done);
        (number, second)
    }

    fn ask_to_reserve(&self, number: u64, key: &[u8], value: &[u8]) -> Answered {
        let (len, crc) = (value.len() as u32, crc_of(key, value));
        self.ask(Request::Reserve { key, number, len, crc })
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        let (mut chain, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = chain.begin(self.table.key());
        let written = chain.also(write(Addr::new(at), bytes));
        block_on(&self.session, self.session.run(NODE, &chain, &mut reply)).expect("it runs");
        reply.get(written).expect("the client may write");
    }

    fn write_value(&self, at: u64, key: &[u8], value: &[u8]) {
        let mut block = Vec::new();
        put_block(&mut block, key, value);
        self.write(at, &block);
    }

    fn read(&self, at: u64, len: u32) -> Vec<u8> {
        let (mut chain, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = chain.begin(self.table.key());
        let bytes = chain.also(read(Addr::new(at), len));
        block_on(&self.session, self.session.run(NODE, &chain, &mut reply)).expect("it runs");
        reply.get(bytes).expect("the client may read").to_vec()
    }

    fn commit(&self, number: u64) -> Outcome {
        self.ask(Request::Commit { number }).outcome
    }

    fn put(&mut self, key: &[u8], value: &[u8]) {
        block_on(&self.session, self.kv.put(key, value)).expect("stored");
    }

    fn get(&mut self, key: &[u8]) -> Option<Vec<u8>> {
        self.try_get(key).unwrap_or_else(|error| panic!("{error}"))
    }

    fn try_get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, KvError> {
        block_on(&self.session, self.kv.get(key)).map(|item| item.map(|item| item.value.to_vec()))
    }

    fn delete(&mut self, key: &[u8]) -> bool {
        block_on(&self.session, self.kv.delete(key)).expect("deleted")
    }

    /// The records of the store, with their addresses.
    fn records(&self) -> Vec<(u64, Record)> {
        let spec = self.table.spec();
        let buckets = (0..spec.partitions).flat_map(|of| (0..spec.buckets()).map(move |bucket| (of, bucket)));
        buckets
            .map(|(partition, bucket)| {
                let at = self.table.bucket_at(partition, bucket);
                (at, Record::read_from_bytes(&self.read(at, RECORD_SIZE as u32)).expect("a record"))
            })
            .collect()
    }
}

fn local(home: &Home) -> Rc<Direct> {
    let node: Arc<dyn LocalNode> = Arc::clone(&home.host) as _;
    Rc::new(local::connect(&node, NODE).expect("a session"))
}

const SOME: &str = r#"{"items": 60}"#;

fn home(parameters: &str) -> Home {
    home_of(KIND, 4, parameters)
}

fn home_of(kind: &str, mib: u64, parameters: &str) -> Home {
    let home =
        Home::with(Mapping::create((mib + 12) << 20, Pages::Small).expect("memory"), Options::default());
    home.create_of(kind, "s", mib, parameters);
    home
}

/// Size of the blocks in use, those of reservations and holds included.
fn used_bytes(home: &Home) -> u64 {
    home.stat("s").service["pool_live_bytes"]
}

fn reservations(home: &Home) -> (u64, u64) {
    let stat = home.stat("s").service;
    (stat["reservations"], stat["reserved_bytes"])
}

/// The cases that the tests of mutants run, too.
#[cfg(farside_mutants)]
pub(crate) const CASES: [(&str, fn()); 18] = [
    ("unanswered put", a_put_that_was_never_answered_costs_no_answered_value),
    ("versions", versions_go_on_when_a_node_takes_over_what_a_replay_has_left_without_a_record),
    ("slow reader", a_reader_whose_value_was_replaced_reads_the_record_again),
    ("reservation", a_reservation_ends_with_its_session_and_not_before),
    ("mode 2", a_reader_during_a_put_in_mode_two_finds_the_old_value_until_the_commit),
    ("delayed commit", a_delayed_commit_replaces_the_values_that_were_put_meanwhile),
    ("cached value", a_cached_value_is_never_taken_for_a_later_one),
    ("deleted key", keys_behind_a_deleted_one_are_still_found),
    ("forged records", forged_records_neither_stop_the_service_nor_change_what_other_keys_return),
    ("new memory", a_log_restores_the_newest_values_in_new_memory),
    ("kept memory", stamps_rise_when_a_node_takes_over_its_memory),
    ("full store", a_full_store_is_restored_whatever_was_deleted_in_between),
    ("full table", a_full_table_of_many_buckets_is_restored),
    ("unanswered reserve", a_put_dropped_before_the_answer_to_its_reserve_gives_its_block_back),
    ("many reservations", a_session_has_a_limited_number_of_reservations),
    ("quarantine", the_quarantine_of_a_replaced_value_begins_when_the_put_ends),
    ("checkpoint", a_step_of_a_checkpoint_copies_a_limited_number_of_bytes),
    ("last stamp", stamps_go_on_after_the_replay_of_a_checkpoint_without_the_last_delete),
];

#[test]
fn a_reservation_ends_with_its_session_and_not_before() {
    let home = home(SOME);
    let (dying, mut other) = (Client::new(&home), Client::new(&home));
    let value = vec![1; 5000];
    let (number, at) = dying.reserve(b"key", &value);
    dying.write_value(at, b"key", &value);
    let (count, bytes) = reservations(&home);
    assert!(count == 1 && bytes >= 5000, "{count} of {bytes} bytes");
    for round in 0..50u8 {
        other.put(b"other", &vec![round; 5000]);
        std::thread::sleep(QUARANTINE / 20);
    }
    assert_eq!(reservations(&home).0, 1, "no time frees a block that a client may be writing");
    let block = dying.read(at, 5008);
    assert_eq!(block[8..], value, "nothing else was written to the block");
    assert_eq!(other.get(b"key"), None, "the client has not committed");
    drop(dying);
    let began = Instant::now();
    while reservations(&home).0 > 0 {
        assert!(began.elapsed() < PATIENCE, "the end of the session frees the block");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(other.commit(number), Outcome::NotReserved);
    assert_eq!(other.get(b"key"), None);
    assert_eq!(other.get(b"other"), Some(vec![49; 5000]));
}

#[test]
fn a_reader_during_a_put_in_mode_two_finds_the_old_value_until_the_commit() {
    let home = home(SOME);
    let (writer, mut reader) = (Client::new(&home), Client::new(&home));
    reader.put(b"key", b"old");
    let value = vec![2; 3000];
    let (number, at) = writer.reserve(b"key", &value);
    assert_eq!(reader.get(b"key").as_deref(), Some(&b"old"[..]), "the block is reserved");
    let mut block = Vec::new();
    put_block(&mut block, b"key", &value);
    writer.write(at, &block[..1000]);
    assert_eq!(reader.get(b"key").as_deref(), Some(&b"old"[..]), "a part is written");
    assert_eq!(writer.commit(number), Outcome::NotWritten);
    assert_eq!(reader.get(b"key").as_deref(), Some(&b"old"[..]));
    let (number, at) = writer.reserve(b"key", &value);
    writer.write(at, &block);
    assert_eq!(reader.get(b"key").as_deref(), Some(&b"old"[..]), "all is written");
    assert_eq!(writer.commit(number), Outcome::Done);
    assert_eq!(reader.get(b"key"), Some(value));
    assert_eq!(writer.commit(number), Outcome::NotReserved, "a reservation is committed once");
}

#[test]
fn a_delayed_commit_replaces_the_values_that_were_put_meanwhile() {
    let home = home(SOME);
    let (late, mut other) = (Client::new(&home), Client::new(&home));
    let value = vec![3; 2000];
    let (number, at) = late.reserve(b"key", &value);
    late.write_value(at, b"key", &value);
    for round in 0..10u8 {
        other.put(b"key", &[round; 2000]);
        std::thread::sleep(QUARANTINE / 5);
    }
    assert!(other.delete(b"key"));
    other.put(b"key", b"again");
    assert_eq!(other.get(b"key").as_deref(), Some(&b"again"[..]));
    assert_eq!(late.commit(number), Outcome::Done);
    assert_eq!(other.get(b"key"), Some(value), "the commit is the instant of the put");
    other.put(b"key", b"last");
    assert_eq!(other.get(b"key").as_deref(), Some(&b"last"[..]));
}

/// A client that is slower than the quarantine READs a block that has another value by now.
#[test]
fn a_reader_whose_value_was_replaced_reads_the_record_again() {
    let home = home(r#"{"items": 6000}"#);
    let mut writer = Client::new(&home);
    writer.put(b"key", &[1; 700]);
    let session = local(&home);
    let slow = Rc::new(Intercept::new(Rc::clone(&session)));
    let mut kv = block_on(&session, Chequer::open(Rc::clone(&slow), NODE, "s")).expect("the store exists");
    let (mut chains, mut writer) = (0, Some(writer));
    slow.before_each(move || {
        chains += 1;
        assert!(chains < 100, "the client reads again and again");
        // Before the READ of the value.
        if chains == 2
            && let Some(mut writer) = writer.take()
        {
            writer.put(b"key", &[2; 700]);
            std::thread::sleep(2 * QUARANTINE);
            // Until the area is full, so that the block is reused.
            let mut others = (0..6000u32).map(u32::to_be_bytes);
            while block_on(&writer.session, writer.kv.put(&others.next().expect("a key"), &[3; 700])).is_ok()
            {
            }
        }
        Then::Runs
    });
    let got = block_on(&session, kv.get(b"key")).expect("read").map(|item| item.value.to_vec());
    assert!(got == Some(vec![2; 700]), "the value by now");
}

#[test]
fn a_reservation_belongs_to_one_session_and_has_one_block() {
    let home = home(SOME);
    let (owner, mut thief) = (Client::new(&home), Client::new(&home));
    let value = vec![4; 1500];
    let (number, at) = owner.reserve(b"key", &value);
    owner.write_value(at, b"key", &value);
    assert_eq!(thief.commit(number), Outcome::NotReserved);
    assert_eq!(thief.ask(Request::Withdraw { number }).outcome, Outcome::NotReserved);
    let foreign = Request::Write { number, offset: 0, bytes: b"thief" };
    assert_eq!(thief.ask(foreign).outcome, Outcome::NotReserved);
    for (offset, len, expected) in [
        (0, 1509, Outcome::NotWritten),
        (1508, 1, Outcome::NotWritten),
        (1_000_000, 1, Outcome::NotWritten),
        (1508, 0, Outcome::Done),
        (1507, 1, Outcome::Done),
    ] {
        let bytes = &vec![4; len][..];
        let outcome = owner.ask(Request::Write { number, offset, bytes }).outcome;
        assert_eq!(outcome, expected, "{len} bytes at {offset}");
    }
    assert_eq!(owner.commit(number), Outcome::Done);
    assert_eq!(thief.get(b"key"), Some(value));
}

#[test]
fn a_cached_value_is_never_taken_for_a_later_one() {
    let home = home(SOME);
    let (mut writer, mut caching) = (Client::new(&home), Client::caching(&home, 100_000));
    for round in 0..20u8 {
        writer.put(b"key", &[round; 500]);
        assert_eq!(caching.get(b"key"), Some(vec![round; 500]), "round {round}");
        if round % 2 == 0 {
            assert!(writer.delete(b"key"));
            if round % 4 == 0 {
                assert_eq!(caching.get(b"key"), None, "round {round}");
            }
        }
    }
}

#[test]
fn keys_behind_a_deleted_one_are_still_found() {
    let home = home(r#"{"items": 8, "block_buckets": 1}"#);
    let mut client = Client::new(&home);
    for key in 0..16u8 {
        client.put(&[key + 1], &[key; 10]);
    }
    for key in 0..16u8 {
        assert!(client.delete(&[key + 1]));
        for other in key + 1..16 {
            assert_eq!(client.get(&[other + 1]), Some(vec![other; 10]), "{other} after the delete of {key}");
        }
    }
}

/// The put is dropped after its reservation was answered: a client does not know the number of another.
#[test]
fn a_dropped_put_in_mode_two_gives_its_block_back_with_the_next_operation() {
    let value = vec![5; 3000];
    // The WRITE never runs; or the WRITE has run, and the put is dropped before its COMMIT.
    for then in [Then::Stops, Then::Runs] {
        let home = home(SOME);
        let session = local(&home);
        let fabric = Rc::new(Intercept::new(Rc::clone(&session)));
        let opened = block_on(&session, Chequer::open(Rc::clone(&fabric), NODE, "s"));
        let mut kv = opened.expect("the store exists");
        let stops_at_commit = matches!(then, Then::Runs);
        let mut fate = Some(then);
        fabric.before_each(move || fate.take().unwrap_or(Then::Runs));
        let mut calls = 0;
        fabric.stop_calls_if(move || {
            calls += 1;
            stops_at_commit && calls == 2
        });
        {
            let mut put = pin!(kv.put(b"key", &value));
            let mut context = Context::from_waker(Waker::noop());
            while !fabric.is_stuck() {
                assert!(put.as_mut().poll(&mut context).is_pending(), "the put is stopped");
            }
        }
        assert_eq!(reservations(&home).0, 1, "nobody has withdrawn it yet");
        let got = block_on(&session, kv.get(b"key")).expect("read").map(|item| item.value.to_vec());
        assert_eq!(got, None, "the put was not committed");
        assert_eq!(reservations(&home), (0, 0), "the get has withdrawn the reservation");
        block_on(&session, kv.put(b"key", &value)).expect("stored");
        let got = block_on(&session, kv.get(b"key")).expect("read").map(|item| item.value.to_vec());
        assert_eq!(got.as_ref(), Some(&value));
        assert_eq!(reservations(&home), (0, 0));
    }
}

/// The put is dropped after the node has reserved its block, and before the client knows that.
#[test]
fn a_put_dropped_before_the_answer_to_its_reserve_gives_its_block_back() {
    let home = home(SOME);
    let session = local(&home);
    let fabric = Rc::new(Intercept::new(Rc::clone(&session)));
    let opened = block_on(&session, Chequer::open(Rc::clone(&fabric), NODE, "s"));
    let mut kv = opened.expect("the store exists");
    fabric.lose_next_answer();
    {
        let mut put = pin!(kv.put(b"key", &[5; 3000]));
        let mut context = Context::from_waker(Waker::noop());
        while !fabric.is_stuck() {
            assert!(put.as_mut().poll(&mut context).is_pending(), "the put waits for the answer");
        }
    }
    assert_eq!(reservations(&home).0, 1);
    assert!(!block_on(&session, kv.contains(b"key")).expect("read"));
    assert_eq!(reservations(&home), (0, 0));
}

#[test]
fn a_session_has_a_limited_number_of_reservations() {
    let home = home(SOME);
    let (mut greedy, other) = (Client::new(&home), Client::new(&home));
    let reserved: Vec<u64> = (0..RESERVATIONS_MAX).map(|_| greedy.reserve(b"key", &[1; 10]).0).collect();
    let next = number_in(0, 1 << 50);
    let outcome = |client: &Client| client.ask_to_reserve(next, b"key", &[1; 10]).outcome;
    assert_eq!(outcome(&greedy), Outcome::TooManyReservations);
    let refused = block_on(&greedy.session, greedy.kv.put(b"key", &[1; 2000])).expect_err("too many");
    let said = refused.to_string();
    assert!(said.contains("256 values on their way") && said.contains("nothing was stored"), "{said}");
    assert_eq!(outcome(&other), Outcome::Done, "each session has a limit of its own");
    assert_eq!(outcome(&other), Outcome::NotReserved, "its number is in use");
    greedy.ask(Request::Withdraw { number: reserved[0] });
    assert_eq!(outcome(&greedy), Outcome::Done);
    assert_eq!(reservations(&home).0, RESERVATIONS_MAX as u64 + 1);
    greedy.ask(Request::Withdraw { number: next });
    greedy.put(b"key", &[1; 2000]);
}

/// A service whose calls a test makes itself, each part at a time of its choice.
struct Bare {
    memory: Mapping,
    plan: Plan,
    table: Table,
    service: Box<dyn Service<Mapping>>,
    /// Number of calls so far.
    calls: Cell<u64>,
}

fn extent_of(plan: &Plan) -> Extent {
    Extent { key: Key::new(1, 1), at: 1 << 20, len: plan.table_len }
}

fn serve(plan: &Plan) -> Box<dyn Service<Mapping>> {
    Kind::<Mapping>::serve(&ChequerKind, &plan.parameters, extent_of(plan)).expect("its own parameters")
}

impl Bare {
    fn new(mib: u64, parameters: &str) -> Bare {
        let memory = Mapping::create((mib + 2) << 20, Pages::Small).expect("memory");
        let plan = Kind::<Mapping>::plan(&ChequerKind, parameters, mib << 20, 7).expect("it fits");
        let table = Table::new(&plan.parameters, extent_of(&plan)).expect("its own parameters");
        let service = serve(&plan);
        Bare { memory, plan, table, service, calls: Cell::new(1) }
    }

    /// Puts a value by a call that begins and ends at these times.
    fn put(&self, key: &[u8], value: &[u8], times: [Duration; 2]) -> Stamp {
        self.change(&Request::Put { key, value }, times)
    }

    /// Puts a value of this length if the store has space for it. Returns whether it has.
    fn has_room(&self, key: &[u8], len: usize) -> bool {
        self.try_change(&Request::Put { key, value: &vec![2; len] }, [Duration::ZERO; 2]).is_some()
    }

    fn delete(&self, key: &[u8], times: [Duration; 2]) -> Stamp {
        self.change(&Request::Delete { key }, times)
    }

    /// Makes a call that begins and ends at these times. Returns the stamp of the put or delete.
    fn change(&self, change: &Request<'_>, times: [Duration; 2]) -> Stamp {
        self.try_change(change, times).expect("a put is logged")
    }

    /// Makes the same call, and returns `None` if the store has no space.
    fn try_change(&self, change: &Request<'_>, [begun, ended]: [Duration; 2]) -> Option<Stamp> {
        let (records, state) = self.begin(change, begun);
        if records.is_empty() {
            let answer = Answer::decode(&state).expect("an answer");
            assert_eq!(answer.outcome, Outcome::OutOfMemory);
            return None;
        }
        Some(self.finish(&state, ended))
    }

    /// Makes the first part of a call. Returns its records, and what it leaves for the second part.
    fn begin(&self, change: &Request<'_>, now: Duration) -> (Records, Vec<u8>) {
        let mut request = Vec::new();
        change.encode(&mut request);
        let (mut scratch, mut log, mut state) = (Vec::new(), Records::default(), Vec::new());
        let context = Work { now, ..self.context(&mut scratch, &mut log) };
        let call = Call { rights: Rights::ALL, session: Some(1), request: &request };
        let Ok(called) = self.service.call(context, call, &mut state);
        called.expect("no refusal");
        (log, state)
    }

    /// Makes the second part of a call. Returns the stamp of the put or delete.
    fn finish(&self, state: &[u8], now: Duration) -> Stamp {
        let (mut scratch, mut log, mut answer) = (Vec::new(), Records::default(), Vec::new());
        let context = Work { now, ..self.context(&mut scratch, &mut log) };
        let Ok(finished) = self.service.finish(context, state, &mut answer);
        finished.expect("no refusal");
        Answer::decode(&answer).expect("an answer").stamp
    }

    /// Makes a call, and adds its records to a log.
    fn change_logged(&self, change: &Request<'_>, log: &mut Vec<Records>) {
        let (records, state) = self.begin(change, Duration::ZERO);
        self.finish(&state, Duration::ZERO);
        log.push(records);
    }

    /// Compares a log with the memory, and adds the records that take back what the memory lacks. Returns the number of
    /// these records.
    fn take_back(&self, log: &mut Vec<Records>) -> usize {
        for record in log.iter().flat_map(Records::iter) {
            let Ok(()) = self.service.compare(&self.memory, record);
        }
        let before = log.len();
        loop {
            let mut records = Records::default();
            let Ok(is_left) = self.service.take_back(&self.memory, &mut records);
            log.push(records);
            if !is_left {
                return log[before..].iter().map(Records::len).sum();
            }
        }
    }

    /// The records of a checkpoint, those of each step.
    fn checkpoint(&self) -> Vec<Records> {
        let (mut steps, mut cursor) = (Vec::new(), Some(0));
        while let Some(at) = cursor {
            let mut records = Records::default();
            let Ok(next) = self.service.checkpoint(&self.memory, at, &mut records);
            assert!(next.is_none_or(|next| next > at));
            steps.push(records);
            cursor = next;
        }
        steps
    }

    fn context<'a>(&'a self, scratch: &'a mut Vec<u8>, log: &'a mut Records) -> Work<'a, Mapping> {
        let seed = self.calls.replace(self.calls.get() + 1);
        Work { memory: &self.memory, now: Duration::ZERO, random: Draws(seed), scratch, log }
    }

    /// Replays records. Returns the number of values that were dropped.
    fn replay(&self, steps: &[Records]) -> u64 {
        let (mut scratch, mut log) = (Vec::new(), Records::default());
        for record in steps.iter().flat_map(Records::iter) {
            let Ok(replayed) = self.service.replay(self.context(&mut scratch, &mut log), record);
            replayed.expect("a record of its own");
        }
        let Ok(dropped) = self.service.replayed(self.context(&mut scratch, &mut log));
        dropped
    }

    /// Another service takes the memory over.
    fn taken_over(self) -> Bare {
        let service = serve(&self.plan);
        let mut cursor = Some(0);
        while let Some(at) = cursor {
            let Ok(next) = service.recover(&self.memory, at);
            cursor = next.expect("its own table");
        }
        Bare { service, ..self }
    }

    /// The block of a key's value, and its bytes.
    fn block_of(&self, key: &[u8]) -> (Block, Vec<u8>) {
        let block = self.find(key).expect("the key has a value");
        (block, self.bytes(block))
    }

    fn has(&self, key: &[u8]) -> bool {
        self.find(key).is_some()
    }

    fn find(&self, key: &[u8]) -> Option<Block> {
        let field = self.table.key_field(key);
        (0..self.table.spec().buckets()).find_map(|bucket| match self.record(bucket).decode() {
            Bucket::Used(used) if used.key == field => Some(used.block),
            _ => None,
        })
    }

    fn record(&self, bucket: u64) -> Record {
        let mut record = [0; RECORD_SIZE as usize];
        let Ok(()) = self.memory.read(self.table.bucket_at(0, bucket), &mut record);
        Record::read_from_bytes(&record).expect("its size")
    }

    fn bytes(&self, block: Block) -> Vec<u8> {
        let mut bytes = vec![0; block.len as usize];
        let Ok(()) = self.memory.read(block.at, &mut bytes);
        bytes
    }
}

/// The second part of a put waits for the disk. A reader may have seen the value until then.
#[test]
fn the_quarantine_of_a_replaced_value_begins_when_the_put_ends() {
    let bare = Bare::new(6, r#"{"items": 60}"#);
    let at = |ms| Duration::from_millis(ms);
    bare.put(b"key", &[1; 500], [at(0), at(0)]);
    let (block, bytes) = bare.block_of(b"key");
    bare.put(b"key", &[2; 500], [at(1), at(1000)]);
    for (key, ms) in [(b"a", 1001), (b"b", 1005), (b"c", 1009)] {
        bare.put(key, &[3; 500], [at(ms), at(ms)]);
        assert_eq!(bare.bytes(block), bytes, "the block is not reused {} ms after the put", ms - 1000);
    }
    bare.put(b"d", &[3; 500], [at(1011), at(1011)]);
    assert_eq!(bare.block_of(b"d").0, block, "the quarantine is over");
}

#[test]
fn a_step_of_a_checkpoint_copies_a_limited_number_of_bytes() {
    const KEYS: u8 = 60;
    const LEN: usize = PART_MAX;
    let bare = Bare::new(8, r#"{"items": 60, "block_buckets": 64}"#);
    for key in 0..KEYS {
        bare.put(&[key], &[key; LEN], [Duration::ZERO; 2]);
    }
    let mut seen = Vec::new();
    let steps = bare.checkpoint();
    for records in &steps {
        assert!(records.size() < (256 << 10) + LEN + 100, "{} bytes in a step", records.size());
        let values = records.iter().filter(|record| last(record).is_none());
        seen.extend(values.map(|record| Logged::decode(record).expect("a record").key[0]));
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..KEYS).collect::<Vec<u8>>(), "each key once");
    assert!(steps.len() > 8, "{} steps", steps.len());
}

/// A client may still have the value of a put in its cache. No later put must have its stamp.
#[test]
fn stamps_go_on_after_the_replay_of_a_checkpoint_without_the_last_delete() {
    let parameters = r#"{"items": 60}"#;
    let mut stamp = Stamp(0);
    let mut steps = Vec::new();
    for life in 0..3 {
        let bare = Bare::new(6, parameters);
        bare.replay(&steps);
        let put = bare.put(b"key", &[1; 100], [Duration::ZERO; 2]);
        assert!(put > stamp, "life {life}: {put:?} after {stamp:?}");
        stamp = bare.delete(b"key", [Duration::ZERO; 2]);
        assert!(stamp > put);
        steps = bare.checkpoint();
    }
}

/// The version of a value is the counter of its stamp. A program may have kept that of a value before the replay.
#[test]
fn versions_go_on_when_a_node_takes_over_what_a_replay_has_left_without_a_record() {
    let before = Bare::new(6, r#"{"items": 60}"#);
    before.put(b"key", &[1; 100], [Duration::ZERO; 2]);
    let last = before.delete(b"key", [Duration::ZERO; 2]);
    let replayed = Bare::new(6, r#"{"items": 60}"#);
    replayed.replay(&before.checkpoint());
    let stamp = replayed.taken_over().taken_over().put(b"key", &[2; 100], [Duration::ZERO; 2]);
    assert!(stamp > last && stamp.counter() > last.counter(), "{stamp:?} after {last:?}");
}

/// A client that may write to the store forges the epoch and the counter in a partition's head.
#[test]
fn stamps_rise_although_a_client_has_forged_the_last_one() {
    let most = Stamp::EPOCH_TAKEN_OVER_MAX;
    let epochs = [
        1,
        most - 1,
        most,
        Stamp::EPOCH_MAX - 1,
        Stamp::EPOCH_MAX,
        Stamp::EPOCH_MAX + 1,
        u64::MAX - 1,
        u64::MAX,
    ];
    for epoch in epochs {
        for counter in [0, 7, u64::MAX] {
            let put = |bare: &Bare| bare.put(b"key", &[1; 100], [Duration::ZERO; 2]);
            let mut bare = Bare::new(6, r#"{"items": 60}"#);
            let mut last = put(&bare);
            let forged = [epoch.to_le_bytes(), counter.to_le_bytes()].concat();
            let Ok(()) = bare.memory.write(bare.table.head_at(0), &forged);
            for life in 0..3 {
                bare = bare.taken_over();
                let stamp = put(&bare);
                // The counter of the forged stamp may be used up, too. Then no stamp is known to follow it.
                let has_next = epoch == 1 || counter < Stamp::COUNTER_MAX;
                assert!(stamp > last || !has_next, "{epoch}, {counter}, {life}: {stamp:?} after {last:?}");
                last = stamp;
            }
        }
    }
}

/// A log that is not synced may lack a delete that took effect. A later put then got the place of the deleted value.
#[test]
fn of_two_values_in_one_place_a_replay_keeps_the_newer_one_if_not_both_fit() {
    const LEN: usize = 20_000;
    for (values, dropped) in [(1, 0), (4000, 1)] {
        let new = || Bare::new(6, r#"{"items": 400}"#);
        let after = new();
        let mut last_stamp = (Vec::new(), Records::default());
        put_last(&mut last_stamp.0, Stamp::new(0, 1), 0);
        last_stamp.1.append(&last_stamp.0);
        assert_eq!(after.replay(&[last_stamp.1]), 0);
        let keys: Vec<[u8; 4]> = (0..values).map(u32::to_le_bytes).collect();
        let fit: Vec<&[u8; 4]> = keys.iter().take_while(|key| after.has_room(*key, LEN)).collect();
        // The deleted key had a bucket that no newer one has.
        let (before, deleted) = (0..100u64)
            .find_map(|number| {
                let (before, deleted) = (new(), [7, number]);
                before.put(deleted.as_bytes(), &[1; LEN], [Duration::ZERO; 2]);
                let buckets = 0..before.table.spec().buckets();
                let own = |bucket: &u64| before.record(*bucket).decode() != Bucket::Never;
                let bucket = buckets.clone().find(own).expect("it was put");
                (after.record(bucket).decode() == Bucket::Never).then_some((before, deleted))
            })
            .expect("half of the buckets are free");
        let deleted = deleted.as_bytes();
        assert_eq!(after.block_of(fit[0]).0.at, before.block_of(deleted).0.at);
        let (older, newer) = (before.checkpoint(), after.checkpoint());
        for steps in [[&older[..], &newer[..]].concat(), [&newer[..], &older[..]].concat()] {
            let replayed = new();
            assert_eq!(replayed.replay(&steps), dropped);
            assert!(fit.iter().all(|key| replayed.has(*key)), "the newer ones stay");
            assert_eq!(replayed.has(deleted), dropped == 0);
            let blocks: BTreeSet<u64> = fit.iter().map(|key| replayed.block_of(*key).0.at).collect();
            assert_eq!(blocks.len(), fit.len(), "each has a place of its own");
        }
    }
}

/// A log that is not synced may lack a delete that took effect. The key may then have got another bucket.
#[test]
fn of_two_values_of_one_key_a_replay_keeps_the_newer_one() {
    let key = b"key";
    let bare = || Bare::new(6, r#"{"items": 60}"#);
    let table = bare().table;
    let first = table.bucket_of(table.home(key), 0);
    let put = |stamp, bucket, place| {
        let (mut record, mut records) = (Vec::new(), Records::default());
        begin_put(&mut record, Stamp::new(1, stamp), key, bucket, place);
        put_block(&mut record, key, &[stamp as u8; 500]);
        records.append(&record);
        records
    };
    let mut delete = (Vec::new(), Records::default());
    put_delete(&mut delete.0, Stamp::new(1, 3), key, first + 1);
    delete.1.append(&delete.0);
    for (older, newer) in [(0, 1), (1, 0)] {
        // In the second round the values have one place, too.
        for place in [1024, 0] {
            let puts = [put(1, first + older, 0), put(2, first + newer, place)];
            for order in [[0, 1], [1, 0]] {
                let replayed = bare();
                replayed.replay(&order.map(|index| puts[index].clone()));
                let (_, bytes) = replayed.block_of(key);
                assert_eq!(value_in(&bytes, key), Some(&[2; 500][..]), "{older} {newer} {place} {order:?}");
                replayed.delete(key, [Duration::ZERO; 2]);
                assert!(!replayed.has(key), "it had one record");
            }
        }
    }
    let deleted = bare();
    deleted.replay(&[put(1, first, 0), delete.1]);
    assert!(!deleted.has(key), "it was in another bucket when it was deleted");
}

/// A put is logged and not installed when its node dies. The next node, which believes the memory, takes it back. That
/// changes neither what was put later nor the stamps of values.
#[test]
fn what_was_never_answered_is_taken_back_and_what_was_put_later_is_not() {
    let mut bare = Bare::new(6, r#"{"items": 60}"#);
    let key = &b"key"[..];
    let (home, block_buckets) = (bare.table.home(key), bare.table.spec().block_buckets);
    let first = bare.table.bucket_of(home, 0);
    let (at_home, elsewhere): (Vec<u32>, Vec<u32>) =
        (0..500u32).partition(|number| bare.table.home(&number.to_be_bytes()).block == home.block);
    let mut log = Vec::new();
    let change = |bare: &Bare, log: &mut Vec<Records>, key: &[u8], value: Option<u8>| match value {
        Some(value) => bare.change_logged(&Request::Put { key, value: &[value; 500] }, log),
        None => bare.change_logged(&Request::Delete { key }, log),
    };
    let [before, other] = [at_home[0], elsewhere[0]].map(u32::to_be_bytes);
    let (before, other) = (&before[..], &other[..]);
    change(&bare, &mut log, before, Some(1));
    change(&bare, &mut log, other, Some(1));
    assert!(
        block_buckets > 1 && bare.record(first).decode() != Bucket::Never,
        "the key's first bucket is in use"
    );
    // A put of a new key, a put that replaces a value, and none of them is installed.
    log.push(bare.begin(&Request::Put { key, value: &[2; 600] }, Duration::ZERO).0);
    log.push(bare.begin(&Request::Put { key: other, value: &[2; 700] }, Duration::ZERO).0);
    bare = bare.taken_over();
    assert_eq!(bare.take_back(&mut log), 2);
    let check = |bare: &Bare, log: &[Records], expected: [(&[u8], Option<u8>); 3]| {
        let replayed = Bare::new(6, r#"{"items": 60}"#);
        assert_eq!(replayed.replay(log), 0);
        for (key, value) in expected {
            let used = |bare: &Bare| {
                let field = bare.table.key_field(key);
                let buckets = 0..bare.table.spec().buckets();
                let mut used = buckets.filter_map(|bucket| match bare.record(bucket).decode() {
                    Bucket::Used(used) if used.key == field => Some((bucket, used)),
                    _ => None,
                });
                (used.next(), used.next())
            };
            assert_eq!(used(&replayed), used(bare), "{key:?} is where the memory has it, with its stamp");
            let found = replayed.find(key).map(|block| replayed.bytes(block));
            let found = found.map(|bytes| value_in(&bytes, key).expect("a value")[0]);
            assert_eq!(found, value, "{key:?}");
        }
    };
    check(&bare, &log, [(key, None), (before, Some(1)), (other, Some(1))]);
    // The key gets the bucket before the one of the put that was taken back.
    change(&bare, &mut log, before, None);
    change(&bare, &mut log, key, Some(3));
    bare = bare.taken_over();
    assert_eq!(bare.take_back(&mut log), 0, "all was taken back before");
    check(&bare, &log, [(key, Some(3)), (before, None), (other, Some(1))]);
    // A delete that was never answered.
    log.push(bare.begin(&Request::Delete { key }, Duration::ZERO).0);
    bare = bare.taken_over();
    assert_eq!(bare.take_back(&mut log), 1);
    check(&bare, &log, [(key, Some(3)), (before, None), (other, Some(1))]);
    change(&bare, &mut log, other, None);
    change(&bare, &mut log, key, Some(4));
    bare = bare.taken_over();
    assert_eq!(bare.take_back(&mut log), 0, "all was taken back or replaced before");
    check(&bare, &log, [(key, Some(4)), (before, None), (other, None)]);
}

/// A put is logged and never answered. The next node believes its memory, in which the key has an older value, and
/// gives the place of the put to another value. Then it loses its memory, before a checkpoint has replaced the log.
#[test]
fn a_put_that_was_never_answered_costs_no_answered_value() {
    const LEN: usize = 20_000;
    // The quarantine of what was freed at the start is over.
    const NOW: Duration = Duration::from_millis(20);
    let key = &b"key"[..];
    let new = || Bare::new(6, r#"{"items": 400}"#);
    for never_answered in [Request::Put { key, value: &[2; LEN] }, Request::Delete { key }] {
        let (mut bare, mut log) = (new(), Vec::new());
        bare.change_logged(&Request::Put { key, value: b"answered" }, &mut log);
        let try_put = |bare: &Bare, log: &mut Vec<Records>, key: u32| {
            let (records, state) =
                bare.begin(&Request::Put { key: &key.to_be_bytes(), value: &[1; LEN] }, NOW);
            let has_space = !records.is_empty();
            if has_space {
                bare.finish(&state, NOW);
                log.push(records);
            }
            has_space
        };
        let count = (0..).take_while(|&key| try_put(&bare, &mut log, key)).count() as u32;
        let last = (count - 1).to_be_bytes();
        bare.change_logged(&Request::Delete { key: &last }, &mut log);
        let (records, _) = bare.begin(&never_answered, 2 * NOW);
        assert!(!records.is_empty(), "the deleted value has left a place");
        log.push(records);
        bare = bare.taken_over();
        bare.take_back(&mut log);
        assert!(try_put(&bare, &mut log, count), "it gets that place");
        assert!(!try_put(&bare, &mut log, count + 1), "there is no other");
        let replayed = new();
        assert_eq!(replayed.replay(&log), 0, "{never_answered:?}");
        let (_, bytes) = replayed.block_of(key);
        assert_eq!(value_in(&bytes, key), Some(&b"answered"[..]), "{never_answered:?}");
        for key in (0..=count).filter(|&key| key != count - 1) {
            let (_, bytes) = replayed.block_of(&key.to_be_bytes());
            assert!(value_in(&bytes, &key.to_be_bytes()) == Some(&[1; LEN][..]), "{key}, {never_answered:?}");
        }
    }
}

/// While a WRITE of a dropped put may run, its block is not given back.
#[test]
fn a_block_to_which_a_write_may_be_on_its_way_is_not_given_back() {
    let home = home(SOME);
    let session = local(&home);
    let fabric = Rc::new(Intercept::new(Rc::clone(&session)));
    let opened = block_on(&session, Chequer::open(Rc::clone(&fabric), NODE, "s"));
    let mut kv = opened.expect("the store exists");
    fabric.of_write(Then::Stops);
    fabric.set_may_run_abandoned(true);
    {
        let mut put = pin!(kv.put(b"key", &[5; 3000]));
        let mut context = Context::from_waker(Waker::noop());
        while !fabric.is_stuck() {
            assert!(put.as_mut().poll(&mut context).is_pending(), "the put is stopped");
        }
    }
    for _ in 0..3 {
        assert!(!block_on(&session, kv.contains(b"key")).expect("read"));
        assert_eq!(reservations(&home).0, 1, "the WRITE may still run");
    }
    fabric.set_may_run_abandoned(false);
    assert!(!block_on(&session, kv.contains(b"key")).expect("read"));
    assert_eq!(reservations(&home).0, 0);
}

#[test]
fn a_value_of_several_parts_is_read_whole_although_it_is_replaced_before_each_call() {
    let home = home_of(MESSAGE_KIND, 8, SOME);
    let mut writer = Client::message(&home);
    let value = |round: u8| vec![round; 3 * PART_MAX - 7];
    writer.put(b"key", &value(0));
    let before = used_bytes(&home);
    let session = local(&home);
    let fabric = Rc::new(Intercept::new(Rc::clone(&session)));
    let opened = block_on(&session, Chequer::open_message(Rc::clone(&fabric), NODE, "s"));
    let mut kv = opened.expect("the store exists");
    let rounds = Rc::new(Cell::new(0));
    let round = Rc::clone(&rounds);
    fabric.before_each_call(move || {
        round.set(round.get() + 1);
        writer.put(b"key", &value(round.get()));
    });
    let got = block_on(&session, kv.get(b"key")).unwrap_or_else(|error| panic!("{error}"));
    let got = got.expect("the key has a value").value;
    assert!(got.iter().all(|byte| *byte == got[0]) && got.len() == 3 * PART_MAX - 7, "a whole value");
    // Its puts came before the first call of the last attempt, and nothing is held any more.
    let last = rounds.get();
    assert!((1..=last).contains(&got[0]), "value {} of {last}", got[0]);
    assert_eq!(used_bytes(&home), before, "no block of a value that was replaced is in use");
}

#[test]
fn a_value_is_held_until_its_client_its_session_or_its_time_ends_the_hold() {
    let home = home_of(MESSAGE_KIND, 8, SOME);
    let (reader, mut other) = (Client::message(&home), Client::message(&home));
    let value = |round: u8| vec![round; 2 * PART_MAX];
    let part = |client: &Client, stamp: Stamp| {
        let request = Request::Get { key: b"key", offset: PART_MAX as u32, stamp };
        let (answered, bytes) = client.ask_whole(request);
        (answered.outcome == Outcome::Done).then_some(bytes)
    };
    let before = |other: &mut Client| {
        other.put(b"key", &value(1));
        used_bytes(&home)
    };
    let ends: [&dyn Fn(Client, Stamp); 3] = [
        &|reader, stamp| {
            let released = reader.ask(Request::Release { key: b"key", stamp }).outcome;
            assert_eq!(released, Outcome::Done);
            assert_eq!(part(&reader, stamp), None, "the hold has ended");
        },
        &|reader, _| drop(reader),
        &|reader, stamp| {
            std::thread::sleep(DEADLINE);
            assert_eq!(part(&reader, stamp), None, "the hold has ended");
        },
    ];
    drop(reader);
    for (way, ends) in ends.into_iter().enumerate() {
        let reader = Client::message(&home);
        let used = before(&mut other);
        let (held, first) = reader.ask_whole(Request::Hold { key: b"key" });
        assert_eq!((held.outcome, first), (Outcome::Done, value(1)[..PART_MAX].to_vec()));
        for round in 2..40 {
            other.put(b"key", &value(round));
            std::thread::sleep(QUARANTINE / 8);
        }
        assert_eq!(part(&other, held.stamp), None, "another session holds nothing");
        assert_eq!(part(&reader, held.stamp), Some(value(1)[PART_MAX..].to_vec()), "the value that is held");
        assert!(used_bytes(&home) > used, "the block is in use");
        ends(reader, held.stamp);
        let began = Instant::now();
        while used_bytes(&home) > used {
            assert!(began.elapsed() < PATIENCE, "way {way} does not free the block");
            std::thread::sleep(Duration::from_millis(1));
            let _ = other.ask(Request::Contains { key: b"key" });
        }
    }
}

/// A client that may only read cannot take the store's space by holds.
#[test]
fn holds_take_a_part_of_the_area_at_most() {
    let home = home_of(MESSAGE_KIND, 8, SOME);
    let (reader, mut writer) = (Client::message(&home), Client::message(&home));
    for round in 0..60u8 {
        writer.put(b"key", &vec![round; 10 * PART_MAX]);
        let (held, _) = reader.ask_whole(Request::Hold { key: b"key" });
        assert_eq!(held.outcome, Outcome::Done);
    }
    assert!(used_bytes(&home) < 4 << 20, "{} bytes in use", used_bytes(&home));
}

/// A client that may write to the store forges records with valid CRCs: their blocks are those of others, or lie
/// outside of the area of values.
#[test]
fn forged_records_neither_stop_the_service_nor_change_what_other_keys_return() {
    const KEYS: u8 = 20;
    let home = home(SOME);
    let (mut hostile, mut other) = (Client::new(&home), Client::new(&home));
    let value = |key: u8| vec![key; 100 + usize::from(key)];
    for key in 1..=KEYS {
        other.put(&[key], &value(key));
    }
    hostile.put(b"mine", &[99; 100]);
    let mine = hostile.table.key_field(b"mine");
    let used = |record: &Record| match record.decode() {
        Bucket::Used(used) => Some(used),
        _ => None,
    };
    let records = hostile.records();
    let place = records.iter().find(|(_, record)| used(record).is_some_and(|of| of.key == mine));
    let at = place.expect("the key has a record").0;
    let area = hostile.table.area(0);
    let theirs: Vec<Used> = records.iter().filter_map(|(_, record)| used(record)).collect();
    let outside = [0, area.start - 64, area.end - 1, area.end, (1 << 40) - 1];
    let blocks = theirs.iter().flat_map(|of| [of.block, Block { at: of.block.at + 32, ..of.block }]);
    let blocks = blocks.chain(outside.map(|at| Block { at, len: 108 }));
    let blocks = blocks.chain([8, 1 << 20].map(|len| Block { at: area.start, len }));
    let mut damaged = 0;
    for (round, block) in blocks.enumerate() {
        let crc_value = theirs[round % theirs.len()].crc_value;
        let forged =
            Record::used(Used { key: mine, block, crc_value, stamp: Stamp(u64::MAX - round as u64) });
        hostile.write(at, forged.as_bytes());
        let _ = hostile.try_get(b"mine");
        match round % 3 {
            0 => drop(hostile.ask(Request::Get { key: b"mine", offset: 0, stamp: Stamp(0) })),
            1 => drop(block_on(&hostile.session, hostile.kv.delete(b"mine"))),
            _ => drop(block_on(&hostile.session, hostile.kv.put(b"mine", &[round as u8; 200]))),
        }
        for key in 1..=KEYS {
            match other.try_get(&[key]) {
                Ok(found) => assert_eq!(found, Some(value(key)), "key {key} in round {round}"),
                Err(KvError::Damaged(_)) => damaged += 1,
                Err(error) => panic!("key {key} in round {round}: {error}"),
            }
        }
        for key in 1..=KEYS {
            // What was damaged is repaired by the next put.
            let _ = block_on(&other.session, other.kv.put(&[key], &value(key)));
        }
    }
    println!("{damaged} gets found a wrong CRC");
    other.put(b"new", b"value");
    assert_eq!(other.get(b"new").as_deref(), Some(&b"value"[..]), "the service still serves");
}

// Restarts.

/// Maps the memory file. Retries, because a process that another test has just forked shares the file's lock until
/// this process starts its own program.
fn mapped(path: &Path) -> Mapping {
    for _ in 0..500 {
        match Mapping::open(path, 16 << 20) {
            Err(MappingError::Foreign(_)) => std::thread::sleep(Duration::from_millis(10)),
            opened => return opened.expect("the file can be mapped").0,
        }
    }
    panic!("the file stays locked");
}

/// Starts a node with logs, in new memory or in that of the file.
fn logging(folder: &Path, memory: Option<&Path>, take_over: bool) -> Home {
    let options = LogOptions { sync: SyncPolicy::Each, checkpoint_min: 3000, ..LogOptions::default() };
    let log = Some(LogFolder { path: folder.to_owned(), options });
    let memory = memory.map_or_else(|| Mapping::create(16 << 20, Pages::Small).expect("memory"), mapped);
    Home::with(memory, Options { log, take_over, ..Options::default() })
}

#[test]
fn a_log_restores_the_newest_values_in_new_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let long = [b'k'; 100];
    let home = logging(folder.path(), None, false);
    home.create_of(KIND, "s", 4, SOME);
    let mut client = Client::new(&home);
    for round in 0..3u8 {
        for key in 1..=20u8 {
            client.put(&[key], &vec![round; 10 + 70 * usize::from(key)]);
        }
        client.put(&long, &[round; 2000]);
        assert!(client.delete(&[1 + round]));
    }
    drop((client, home));
    for life in 0..3 {
        let home = logging(folder.path(), None, false);
        let mut client = Client::new(&home);
        for key in 1..=20u8 {
            let expected = (key != 3).then(|| vec![2; 10 + 70 * usize::from(key)]);
            assert_eq!(client.get(&[key]), expected, "key {key} in life {life}");
        }
        assert_eq!(client.get(&long), Some(vec![2; 2000]));
    }
}

/// A client that may write to the store gives its key the block of another key, damages the value of a third, and
/// forges a stamp. The checkpoints after that still restore the store.
#[test]
fn a_log_restores_a_store_whose_table_a_client_has_overwritten() {
    let folder = tempfile::tempdir().expect("a folder");
    let home = logging(folder.path(), None, false);
    home.create_of(KIND, "s", 4, SOME);
    let (hostile, mut other) = (Client::new(&home), Client::new(&home));
    let value = |key: u8| vec![key; 1000];
    for key in 1..=20u8 {
        other.put(&[key], &value(key));
    }
    let records = hostile.records();
    let of = |key: u8| {
        let key = hostile.table.key_field(&[key]);
        let found = records.iter().find_map(|(at, record)| match record.decode() {
            Bucket::Used(used) if used.key == key => Some((*at, used)),
            _ => None,
        });
        found.expect("the key has a record")
    };
    let [(first_at, first), (_, second), (_, third), (fourth_at, fourth)] = [1, 2, 3, 4].map(of);
    let shared = Used { block: second.block, crc_value: second.crc_value, ..first };
    hostile.write(first_at, Record::used(shared).as_bytes());
    hostile.write(third.block.at + 500, &[0; 8]);
    hostile.write(fourth_at, Record::used(Used { stamp: Stamp(u64::MAX), ..fourth }).as_bytes());
    // The log has a checkpoint of all this by now, more than once.
    for round in 0..200u32 {
        other.put(&[20], &vec![round as u8; 1000]);
    }
    drop((hostile, other, home));
    for life in 0..2 {
        let home = logging(folder.path(), None, false);
        let mut client = Client::new(&home);
        for key in 5..20u8 {
            assert_eq!(client.get(&[key]), Some(value(key)), "key {key} in life {life}");
        }
        assert_eq!(client.get(&[2]), Some(value(2)), "the key whose block another record has, too");
        assert_eq!(client.get(&[20]), Some(vec![199; 1000]));
        assert_ne!(client.get(&[3]), Some(vec![3; 1000]), "a value that was damaged");
        client.put(&[4], b"again");
        assert_eq!(client.get(&[4]).as_deref(), Some(&b"again"[..]), "stamps go on");
        client.put(&[4], &value(4));
    }
}

#[test]
fn stamps_rise_when_a_node_takes_over_its_memory() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("memory");
    let serve = |take_over| Home::with(mapped(&path), Options { take_over, ..Options::default() });
    let mut last = Stamp(0);
    for life in 0..5u8 {
        let home = serve(life > 0);
        if life == 0 {
            home.create_of(KIND, "s", 4, SOME);
        }
        let mut client = Client::new(&home);
        for round in 0..3 {
            client.put(b"key", &[life; 10]);
            let records = client.records();
            let stamps = records.iter().filter_map(|(_, record)| match record.decode() {
                Bucket::Used(used) => Some(used.stamp),
                _ => None,
            });
            let stamp = stamps.max().expect("the key has a value");
            assert!(stamp > last, "life {life}, put {round}: {stamp:?} after {last:?}");
            last = stamp;
        }
        assert_eq!(client.get(b"key"), Some(vec![life; 10]));
    }
}

/// A search visits at most half of the buckets. The keys of a checkpoint are in the order of their buckets: in this
/// order they would get other buckets, and some would find none.
#[test]
fn a_full_table_of_many_buckets_is_restored() {
    const BUCKETS: u32 = 1024;
    let folder = tempfile::tempdir().expect("a folder");
    let serve = || {
        let options = LogOptions { sync: SyncPolicy::Never, checkpoint_min: 3000, ..LogOptions::default() };
        let log = Some(LogFolder { path: folder.path().to_owned(), options });
        let memory = Mapping::create(16 << 20, Pages::Small).expect("memory");
        Home::with(memory, Options { log, ..Options::default() })
    };
    let home = serve();
    home.create_of(KIND, "s", 4, r#"{"items": 512}"#);
    let mut client = Client::new(&home);
    let try_put = |client: &mut Client, key: u32, round: u32| {
        block_on(&client.session, client.kv.put(&key.to_be_bytes(), &round.to_be_bytes())).is_ok()
    };
    let mut keys: Vec<u32> = (0..20_000).filter(|&key| try_put(&mut client, key, 0)).collect();
    // Some are deleted, and others get their buckets.
    for &key in keys.iter().step_by(5) {
        assert!(client.delete(&key.to_be_bytes()));
    }
    keys = keys.into_iter().enumerate().filter_map(|(at, key)| (at % 5 != 0).then_some(key)).collect();
    keys.extend((20_000..40_000).filter(|&key| try_put(&mut client, key, 0)));
    assert!(keys.len() > BUCKETS as usize * 9 / 10, "{} keys", keys.len());
    for round in 1..6 {
        assert!(keys.iter().all(|&key| try_put(&mut client, key, round)), "round {round}");
    }
    drop((client, home));
    for life in 0..2 {
        let home = serve();
        let mut client = Client::new(&home);
        for &key in &keys {
            let expected = 5u32.to_be_bytes();
            assert_eq!(
                client.get(&key.to_be_bytes()).as_deref(),
                Some(&expected[..]),
                "{key} in life {life}"
            );
        }
        let files = std::fs::read_dir(folder.path()).expect("a folder").flatten();
        let files = files.filter_map(|entry| std::fs::read_dir(entry.path()).ok()).flatten().flatten();
        let mut names = files.map(|file| file.file_name().to_string_lossy().into_owned());
        assert!(names.any(|name| name.starts_with("checkpoint.0")), "the log has a checkpoint");
    }
}

/// Keys and values take turns in a store that is always full. So the log has more of them than the store has space for,
/// and they fit only once later deletes and puts are replayed, and only where they were.
#[test]
fn a_full_store_is_restored_whatever_was_deleted_in_between() {
    (0..3).for_each(restore_full_store);
}

fn restore_full_store(seed: u64) {
    let folder = tempfile::tempdir().expect("a folder");
    let home = logging(folder.path(), None, false);
    home.create_of(KIND, "s", 1, r#"{"items": 4}"#);
    let mut client = Client::new(&home);
    let mut expected = std::collections::BTreeMap::new();
    let (mut state, mut deleted) = (7 + seed, 0);
    let len_max = [40_000, 150_000, 300_000][seed as usize % 3];
    for round in 0..120u32 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let len = (state >> 40) as usize % len_max + 1;
        let (key, value) = (round.to_be_bytes(), vec![round as u8; len]);
        while block_on(&client.session, client.kv.put(&key, &value)).is_err() {
            let (first, _): (u32, Vec<u8>) = expected.pop_first().expect("an empty store has space");
            assert!(client.delete(&first.to_be_bytes()));
            deleted += 1;
        }
        expected.insert(round, value);
    }
    assert!(deleted > 50, "the store is full: {deleted} keys were deleted");
    drop((client, home));
    for life in 0..2 {
        let home = logging(folder.path(), None, false);
        let mut client = Client::new(&home);
        for round in 0..120u32 {
            assert!(
                client.get(&round.to_be_bytes()).as_ref() == expected.get(&round),
                "{round} in life {life} of seed {seed}"
            );
        }
    }
}
