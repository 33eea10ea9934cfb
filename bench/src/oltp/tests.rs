//! Tests of the benchmarks on a store in memory that runs one transaction at a time, and may be told to cheat.

use std::collections::BTreeMap;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use farside_systems::txn::{Committed, Left, Read};

use super::objects::Objects;
use super::smallbank::SmallBank;
use super::tatp::Tatp;
use super::*;
use crate::driver::{Fault, Trouble as _};
use crate::workload::Distribution;

/// A serial store. It loses or repeats nothing, unless a test says so.
#[derive(Default)]
struct Serial {
    rows: BTreeMap<Vec<u8>, Vec<u8>>,
    writes: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
    /// Number of next commits that fail by a conflict.
    conflicts: u32,
    /// All keys that were read.
    read: Vec<[u8; 8]>,
    /// Whether the next commit that changes a row is reported and not done.
    loses: bool,
    /// Error of the next commit that changes a row, and whether it is done nevertheless.
    fails: Option<(TxnError, bool)>,
}

impl Txn for Serial {
    fn kind(&self) -> &'static str {
        "serial"
    }

    fn value_max(&self) -> usize {
        1 << 10
    }

    fn lease(&self) -> Duration {
        Duration::ZERO
    }

    fn member_of(&self, _key: &[u8]) -> usize {
        0
    }

    fn begin(&mut self) {
        self.writes.clear();
    }

    async fn fetch(&mut self, _keys: &[&[u8]]) -> Result<(), TxnError> {
        Ok(())
    }

    async fn read(&mut self, key: &[u8]) -> Result<Read<'_>, TxnError> {
        self.read.push(key.try_into().expect("keys have 8 bytes"));
        let value = match self.writes.get(key) {
            Some(written) => written.as_deref(),
            None => self.rows.get(key).map(Vec::as_slice),
        };
        Ok(Read { value, version: None })
    }

    fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), TxnError> {
        self.writes.insert(key.to_vec(), Some(value.to_vec()));
        Ok(())
    }

    fn delete(&mut self, key: &[u8]) -> Result<(), TxnError> {
        self.writes.insert(key.to_vec(), None);
        Ok(())
    }

    async fn commit(&mut self) -> Result<Committed, TxnError> {
        let writes = std::mem::take(&mut self.writes);
        if self.conflicts > 0 {
            self.conflicts -= 1;
            return Err(TxnError::Conflict);
        }
        let changes = writes.iter().any(|(key, value)| self.rows.get(key) != value.as_ref());
        if self.loses && changes {
            self.loses = false;
            return Ok(Committed { version: None });
        }
        let failed = if changes { self.fails.take() } else { None };
        if let Some((error, false)) = failed {
            return Err(error);
        }
        for (key, value) in writes {
            match value {
                Some(value) => self.rows.insert(key, value),
                None => self.rows.remove(&key),
            };
        }
        match failed {
            Some((error, _)) => Err(error),
            None => Ok(Committed { version: None }),
        }
    }

    fn keeper<'f>(&self) -> Pin<Box<dyn Future<Output = ()> + 'f>>
    where
        Self: 'f,
    {
        Box::pin(std::future::ready(()))
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    async fn left(&self) -> Result<Left, TxnError> {
        Ok(Left::default())
    }
}

/// A clock whose pauses take no time.
struct NoTime;

impl Clock for NoTime {
    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn wall(&self) -> Duration {
        Duration::ZERO
    }

    fn sleep(&self, _duration: Duration) -> impl Future<Output = ()> {
        std::future::ready(())
    }
}

fn now<O>(future: impl Future<Output = O>) -> O {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("the store in memory never waits"),
    }
}

/// A loaded store, and the run on it.
struct Loaded<B: Benchmark> {
    run: Run<B>,
    client: Client<Serial, NoTime>,
    source: Source<B>,
    task: Option<Task>,
}

impl<B: Benchmark> Loaded<B> {
    fn with(benchmark: B) -> Loaded<B> {
        let run = Oltp::run(benchmark, 1, 1, 7, true).expect("there is a task");
        let mut client = Client { txn: Serial::default(), clock: NoTime };
        let mut task = run.work().task(0);
        for unit in 0..run.benchmark().units() {
            now(run.work().load(&mut client, unit, &mut task)).expect("the store has room");
        }
        let source = run.work().source(workload::random(11));
        Loaded { run, client, source, task: Some(task) }
    }

    fn perform(&mut self, transactions: u32) -> Result<(), TxnTrouble> {
        for _ in 0..transactions {
            let drawn = Oltp::<B>::draw(&mut self.source);
            let task = self.task.as_mut().expect("the task goes on");
            now(self.run.work().perform(&mut self.client, drawn, task))?;
        }
        Ok(())
    }

    /// Performs one transaction of this kind.
    fn perform_one(&mut self, kind: usize) -> Result<(), TxnTrouble> {
        loop {
            let drawn = Oltp::<B>::draw(&mut self.source);
            if Oltp::<B>::kind(drawn) == kind {
                let task = self.task.as_mut().expect("the task goes on");
                return now(self.run.work().perform(&mut self.client, drawn, task));
            }
        }
    }

    /// Ends the task, and checks all rows and totals.
    fn audit(&mut self) -> Result<(), TxnTrouble> {
        drop(self.task.take());
        let total = now(self.run.work().audit(&mut self.client, 0, 1))?;
        self.run.work().check_total(total)
    }

    /// The share of each kind, and its rate of success.
    fn rates(&self) -> Vec<(&'static str, f64, f64)> {
        let kinds = self.run.kinds();
        let all: u64 = kinds.iter().map(|(_, kind)| kind.commits).sum();
        kinds
            .iter()
            .map(|(name, kind)| (*name, kind.commits as f64 / all as f64, kind.success_rate()))
            .collect()
    }
}

fn objects(keys: usize, write_share: f64, len: usize) -> Objects {
    let distribution = Distribution::Uniform;
    Objects::new(objects::Plan { objects: 500, len, keys, write_share, distribution })
        .expect("it is possible")
}

/// Asserts shares and rates of success, which may differ by `within` and `around`.
fn assert_rates(found: &[(&str, f64, f64)], expected: &[(&str, f64, [f64; 2])]) {
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for ((name, share, rate), (of, shares, [low, high])) in found.iter().zip(expected) {
        assert_eq!(name, of);
        assert!((share - shares).abs() < 0.005, "{name}: a share of {share}, not {shares}");
        assert!((low..=high).contains(&rate), "{name}: {rate} succeed, and not {low} to {high}");
    }
}

#[test]
fn tatp_has_the_shares_and_the_rates_of_success_of_its_specification() {
    let mut loaded = Loaded::with(Tatp::new(40_000).expect("it is possible"));
    loaded.perform(400_000).expect("nothing fails");
    loaded.audit().expect("all rows are right");
    assert_rates(
        &loaded.rates(),
        &[
            ("get subscriber data", 0.35, [1.0, 1.0]),
            ("get access data", 0.35, [0.6125, 0.6375]),
            ("get new destination", 0.10, [0.195, 0.24]),
            ("update subscriber data", 0.02, [0.6, 0.65]),
            ("update location", 0.14, [1.0, 1.0]),
            ("insert call forwarding", 0.02, [0.285, 0.34]),
            ("delete call forwarding", 0.02, [0.285, 0.34]),
        ],
    );
}

#[test]
fn smallbank_has_the_shares_of_its_mix_and_only_payments_fail() {
    let mut loaded = Loaded::with(SmallBank::new(1_000).expect("it is possible"));
    loaded.perform(200_000).expect("nothing fails");
    loaded.audit().expect("the balances add up");
    let found = loaded.rates();
    let whole = [1.0, 1.0];
    assert_rates(
        &found,
        &[
            ("amalgamate", 0.15, whole),
            ("balance", 0.15, whole),
            ("deposit checking", 0.15, whole),
            ("send payment", 0.25, [0.0, 1.0]), // The next test has the rate.
            ("transact savings", 0.15, whole),
            ("write check", 0.15, whole),
        ],
    );
}

/// A payment fails if an amalgamate has emptied the account, and the account has not received the amount since.
///
/// Let `r` be the probability that a transaction empties a given hot account, and `p` the share of the hot accounts
/// that have money from the load. An amalgamate moves the money of such an account, if it is drawn, to an account that
/// may be another one of them. So `dp/dt = -r p`, plus `r p (1 - p)`, and `p = 1 / (1 + r t)`. Of the others, of which
/// there are fewer than `r t`, payments (25 for 15 amalgamates) or each other's amalgamates fund a few: their share
/// grows by less than `r (25 / 15 + r t) r t`.
#[test]
fn payments_fail_as_often_as_amalgamates_have_emptied_accounts() {
    let (accounts, transactions) = (200_000, 12_000);
    let mut loaded = Loaded::with(SmallBank::new(accounts).expect("it is possible"));
    loaded.perform(transactions).expect("nothing fails");
    loaded.audit().expect("each account has its balances");
    let payments = loaded.run.kinds().into_iter().find(|(name, _)| *name == "send payment");
    let (_, payments) = payments.expect("a quarter are payments");

    let (hot_accounts, hot_share) = (0.04 * accounts as f64, 0.9 + 0.1 * 0.04);
    let rt = f64::from(transactions) * 0.15 * hot_share / hot_accounts;
    // Means over the time of the run.
    let rich = rt.ln_1p() / rt;
    let funded = 25.0 / 15.0 * rt.powi(2) / 6.0 + rt.powi(3) / 12.0;
    // The other accounts are hardly ever emptied.
    let of_all = |hot: f64| hot_share * hot + (1.0 - hot_share);
    let deviation = (rich * (1.0 - rich) / payments.commits as f64).sqrt();
    let [low, high] = [of_all(rich) - 3.0 * deviation, of_all(rich + funded) + 3.0 * deviation];
    assert!(high - low < 0.05, "{low} to {high}");
    assert!((low..=high).contains(&payments.success_rate()), "{payments:?}, not {low} to {high}");
}

/// The number of an account or a subscriber is in the last four bytes of a key.
fn number(key: &[u8; 8]) -> u32 {
    u64::from_be_bytes(*key) as u32
}

#[test]
fn smallbank_uses_hot_accounts_nine_times_of_ten() {
    let mut loaded = Loaded::with(SmallBank::new(1_000).expect("it is possible"));
    loaded.perform(100_000).expect("nothing fails");
    let read = &loaded.client.txn.read;
    assert!(read.iter().all(|key| number(key) < 1_000));
    // 4 % of the other transactions hit a hot account by chance.
    let hot = read.iter().filter(|key| number(key) < 40).count() as f64 / read.len() as f64;
    assert!((hot - (0.9 + 0.1 * 0.04)).abs() < 0.005, "{hot}");
}

#[test]
fn tatp_prefers_subscribers_whose_numbers_have_many_ones() {
    let mut loaded = Loaded::with(Tatp::new(1 << 14).expect("it is possible"));
    loaded.perform(50_000).expect("nothing fails");
    let subscribers = loaded.client.txn.read.iter().filter(|key| key[0] == 1);
    let ones: Vec<u32> = subscribers.map(|key| number(key).count_ones()).collect();
    // Each of the 14 bits is set unless both draws lack it.
    let mean = f64::from(ones.iter().sum::<u32>()) / ones.len() as f64;
    assert!(ones.len() > 20_000 && (mean - 0.75 * 14.0).abs() < 0.05, "{mean} bits");
}

/// The hottest of a million subscribers is as hot after they are folded onto 15,000. Of 15,000 it would be hotter.
#[test]
fn folded_subscribers_are_as_hot_as_all_of_them() {
    let hottest = |tatp: Result<Tatp, String>| {
        let mut loaded = Loaded::with(tatp.expect("it is possible"));
        loaded.perform(50_000).expect("nothing fails");
        let mut counts = [0u32; 15_000];
        let read = loaded.client.txn.read.iter().filter(|key| key[0] == 1);
        read.for_each(|key| counts[number(key) as usize] += 1);
        f64::from(counts.into_iter().max().expect("it is not empty")) / f64::from(counts.iter().sum::<u32>())
    };
    let [few, folded] = [Tatp::new(15_000), Tatp::folded(15_000, 1_000_000)].map(hottest);
    // 16 bits are set unless both draws lack them, and the others are those of one draw.
    let of_all = 0.75f64.powi(16) / (1e6 / f64::from(1 << 16));
    assert!(folded < 2.0 * of_all && few > 4.0 * of_all, "{folded} and {few}, {of_all} of all");
}

#[test]
fn objects_are_written_with_their_share() {
    let mut loaded = Loaded::with(objects(4, 0.25, 100));
    loaded.perform(50_000).expect("nothing fails");
    loaded.audit().expect("the counts add up");
    let reads = 0.75f64.powi(4);
    assert_rates(&loaded.rates(), &[("read", reads, [1.0, 1.0]), ("update", 1.0 - reads, [1.0, 1.0])]);
}

#[test]
fn a_transaction_has_up_to_32_objects_of_any_length() {
    for (keys, len) in [(32, 100), (1, 8), (32, 41)] {
        let mut loaded = Loaded::with(objects(keys, 1.0, len));
        loaded.perform(20).expect("nothing fails");
        loaded.audit().expect("the counts add up");
        assert!(loaded.client.txn.rows.values().all(|value| value.len() == len));
    }
}

#[test]
fn attempts_that_conflict_are_repeated_with_the_same_arguments() {
    let mut loaded = Loaded::with(SmallBank::new(100).expect("it is possible"));
    for _ in 0..100 {
        loaded.client.txn.conflicts = 3;
        loaded.perform(1).expect("the fourth attempt commits");
    }
    loaded.audit().expect("the balances add up");
    assert!((loaded.run.work().abort_rate() - 0.75).abs() < 1e-9, "{}", loaded.run.work().abort_rate());
}

#[test]
fn a_transaction_that_fails_is_no_conflict() {
    let mut loaded = Loaded::with(objects(1, 1.0, 8));
    loaded.client.txn.conflicts = 1;
    loaded.perform(1).expect("the second attempt commits");
    loaded.client.txn.fails = Some((TxnError::Lost, false));
    loaded.perform(1).expect_err("it fails");
    loaded.perform(1).expect("nothing fails");
    loaded.audit().expect("the counts add up");
    let kind = Kind { tries: Tries { attempts: 4, conflicts: 1 }, commits: 2, succeeded: 2, errors: 1 };
    assert_eq!((loaded.run.kinds(), loaded.run.work().abort_rate()), (vec![("update", kind)], 0.25));
}

/// Has a store do something wrong with one transaction of each kind that writes, among many right ones. Returns the
/// outcomes of the audits.
fn audits<B: Benchmark>(benchmark: B, writing: &[&str], wrong: fn(&mut Serial)) -> Vec<Option<TxnTrouble>> {
    let kind_of = |name: &&str| B::KINDS.iter().position(|kind| kind == name).expect("it has this kind");
    let audit = |kind: usize| {
        let mut loaded = Loaded::with(benchmark.clone());
        loaded.perform(200).expect("nothing fails");
        wrong(&mut loaded.client.txn);
        // Some transactions of this kind change nothing.
        while loaded.client.txn.loses || loaded.client.txn.fails.is_some() {
            let _unknown = loaded.perform_one(kind);
        }
        loaded.perform(200).expect("nothing fails");
        loaded.audit().err()
    };
    writing.iter().map(kind_of).map(audit).collect()
}

/// The same with each benchmark.
fn audits_of_all(wrong: fn(&mut Serial)) -> Vec<Option<TxnTrouble>> {
    let bank = SmallBank::new(100).expect("it is possible");
    let writing = ["amalgamate", "deposit checking", "send payment", "transact savings", "write check"];
    let mut all = audits(bank, &writing, wrong);
    let tatp = Tatp::new(100).expect("it is possible");
    let writing =
        ["update subscriber data", "update location", "insert call forwarding", "delete call forwarding"];
    all.extend(audits(tatp, &writing, wrong));
    all.extend(audits(objects(2, 0.5, 100), &["update"], wrong));
    all
}

#[test]
fn one_lost_transaction_of_any_kind_is_found() {
    for audit in audits_of_all(|store| store.loses = true) {
        let trouble = audit.expect("a transaction was lost");
        assert!(matches!(trouble, TxnTrouble::Total { .. }), "{trouble}");
        assert_eq!(trouble.fault(), Fault::Violated);
    }
}

#[test]
fn a_transaction_of_unknown_outcome_may_have_committed_or_not() {
    fn fails(store: &mut Serial, is_done: bool) {
        store.fails = Some((TxnError::Unknown(Box::new(TxnError::Lost)), is_done));
    }
    let audits = [audits_of_all(|store| fails(store, true)), audits_of_all(|store| fails(store, false))];
    for audit in audits.into_iter().flatten() {
        assert!(audit.is_none(), "{audit:?}");
    }
}

#[test]
fn a_failed_transaction_that_was_carried_out_is_found() {
    for audit in audits_of_all(|store| store.fails = Some((TxnError::Conflict, true))) {
        assert!(matches!(audit, Some(TxnTrouble::Total { .. })), "it was done twice: {audit:?}");
    }
    for audit in audits_of_all(|store| store.fails = Some((TxnError::Lost, true))) {
        assert!(matches!(audit, Some(TxnTrouble::Total { .. })), "it was not to be done: {audit:?}");
    }
}

#[test]
fn a_call_forwarding_without_its_facility_is_found() {
    let mut loaded = Loaded::with(Tatp::new(20).expect("it is possible"));
    let rows = &mut loaded.client.txn.rows;
    // Table 4 has the facilities, and table 5 the call forwardings of the same subscriber and type.
    let forwarding = rows.keys().find(|key| key[0] == 5).expect("half of them are loaded").clone();
    let mut facility = forwarding.clone();
    (facility[0], facility[2]) = (4, 0);
    rows.remove(&facility).expect("a call forwarding has its facility");
    let trouble = loaded.audit().expect_err("the facility is gone");
    assert!(trouble.to_string().contains("facility"), "{trouble}");
}

#[test]
fn rows_of_another_table_or_subscriber_are_found() {
    let mut loaded = Loaded::with(Tatp::new(20).expect("it is possible"));
    let rows = &mut loaded.client.txn.rows;
    let mut subscribers = rows.iter_mut().filter(|(key, _)| key[0] == 1).map(|(_, value)| value);
    let (one, other) = (subscribers.next().expect("a row"), subscribers.next().expect("a row"));
    std::mem::swap(one, other);
    assert!(loaded.audit().expect_err("two rows are swapped").to_string().contains("has the row"));

    let mut loaded = Loaded::with(objects(1, 0.0, 100));
    let value = loaded.client.txn.rows.values_mut().next().expect("a row");
    value[99] ^= 1;
    let trouble = loaded.audit().expect_err("the last byte is wrong");
    assert_eq!(trouble.to_string(), "object 0 has no value, or a wrong one");
}

#[test]
fn impossible_benchmarks_are_refused() {
    assert!(SmallBank::new(1).expect_err("one account").contains("give 2 or more --records"));
    assert!(Tatp::new(0).expect_err("none").contains("tatp has 1 to 1000000000 subscribers"));
    let plan = objects::Plan {
        objects: 3,
        len: 100,
        keys: 4,
        write_share: 0.5,
        distribution: Distribution::Uniform,
    };
    let refused = |plan| Objects::new(plan).expect_err("it is not possible");
    assert!(refused(plan).contains("give more --records"));
    assert!(refused(objects::Plan { objects: 9, len: 7, ..plan }).contains("no room for its count"));
    assert!(refused(objects::Plan { objects: 90, keys: 33, ..plan }).contains("1 to 32 objects"));
    assert!(refused(objects::Plan { objects: 9, write_share: 1.5, ..plan }).contains("is no share"));
}
