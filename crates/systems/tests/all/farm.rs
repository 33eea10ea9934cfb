//! Tests of FaRM: results, costs, interleavings that broken variants do not survive, and clients that die at each
//! request of a commit.

use crate::support::steered::{Nodes, Request, Steering, Then, on_nodes};
use farside_remote::NodeId;
use farside_remote::fabric::Ran;
use farside_systems::members::{self, New};
use farside_systems::registry;
use farside_systems::system::{Options, Sizing, System};
use farside_systems::txn::farm::service::FarmKind;
use farside_systems::txn::farm::{Farm, KIND, Stat};
use farside_systems::txn::{Committed, Transacting, Txn, TxnError};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

const STORE: &str = "s";
/// Longer than each test's transactions: no renewal is among the requests that a test counts.
const LEASE: Duration = Duration::from_millis(20);
/// A lock call, a commit call, a look at a lane, and a truncation.
const LOCK: Request = Request::Call(2);
const COMMIT: Request = Request::Call(5);
const TRUNCATE: Request = Request::Call(6);
const LOOK: Request = Request::Call(7);

/// A client with its own task.
struct Client {
    fabric: Steering,
    txn: Farm<Steering>,
    has_ended: Rc<Cell<bool>>,
}

async fn create(nodes: &Nodes, members: u32, backups: u8) {
    create_for(nodes, members, backups, 4).await;
}

/// Creates a store with this number of client ids.
async fn create_for(nodes: &Nodes, members: u32, backups: u8, ids: u16) {
    let transacting =
        Transacting { ids: Some(ids), lanes: Some(1), backups: Some(backups), ..Transacting::NONE };
    let sizing =
        Sizing { items: Some(40), value_len: 100, lease: Some(LEASE), transacting, ..Sizing::default() };
    let (quota, members_count) = ((u64::from(members) * 2) << 20, members as usize);
    let new = New { name: STORE.into(), kind: KIND.into(), sizing, quota, members: members_count };
    let fabric = nodes.client().await;
    members::create(&fabric, members, &new, [1, 2]).await.expect("the nodes have memory");
}

impl Client {
    async fn open(nodes: &Nodes, members: u32) -> Client {
        let fabric = nodes.client().await;
        let described = members::open(&fabric, members, STORE).await.expect("the store exists");
        let entropy = u64::from(fabric.inner().process.0) + 77;
        let options = Options { entropy, ..Options::NONE };
        let txn = FarmKind::open(Rc::clone(&fabric), &described, &options).await.expect("an id is free");
        let (keeper, has_ended) = (txn.keeper(), Rc::new(Cell::new(false)));
        let ended = Rc::clone(&has_ended);
        let steered = fabric.inner();
        steered.world.spawn(steered.process, async move {
            keeper.await;
            ended.set(true);
        });
        // The task is to run before the test steers requests.
        steered.world.sleep(1).await;
        fabric.take();
        Client { fabric, txn, has_ended }
    }

    async fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, TxnError> {
        self.txn.begin();
        let value = self.txn.get(key).await?.map(<[u8]>::to_vec);
        self.txn.commit().await?;
        Ok(value)
    }

    /// Commits writes without reads.
    async fn put(&mut self, writes: &[(&[u8], &[u8])]) -> Result<Committed, TxnError> {
        self.txn.begin();
        for (key, value) in writes {
            self.txn.put(key, value)?;
        }
        self.txn.commit().await
    }

    /// Reads keys, and then writes other ones with this value.
    async fn update(&mut self, reads: &[&[u8]], writes: &[&[u8]], value: &[u8]) -> Result<(), TxnError> {
        self.txn.begin();
        self.txn.fetch(reads).await?;
        for key in writes {
            self.txn.put(key, value)?;
        }
        self.txn.commit().await.map(drop)
    }

    async fn close(self) {
        let Client { fabric, txn, has_ended } = self;
        drop(txn);
        while !has_ended.get() {
            fabric.inner().world.sleep(1000).await;
        }
    }

    fn counter(&self, name: &str) -> u64 {
        let counters = self.txn.counters();
        counters.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no counter {name}")).1
    }
}

/// Returns keys with a prefix, of which the first `count` belong to the given member.
fn keys_of(client: &Client, member: usize, count: usize) -> Vec<Vec<u8>> {
    let keys = (0_u32..).map(|number| format!("k{number}").into_bytes());
    keys.filter(|key| client.txn.member_of(key) == member).take(count).collect()
}

/// Heals the store, and returns what is left.
async fn settled(nodes: &Nodes, members: u32) -> Result<(Client, Stat), String> {
    let fabric = nodes.client().await;
    let described = members::open(&fabric, members, STORE).await.map_err(|error| error.to_string())?;
    registry::heal(fabric, &described, &Options::NONE).await.map_err(|error| error.to_string())?;
    let client = Client::open(nodes, members).await;
    let stat = client.txn.stat().await.map_err(|error| error.to_string())?;
    Ok((client, stat))
}

/// # Errors
/// Something is left of a transaction.
fn check(stat: Stat) -> Result<(), String> {
    match (stat.locked, stat.open, stat.outdated) {
        (0, 0, 0) => Ok(()),
        _ => Err(format!("something is left: {stat:?}")),
    }
}

#[test]
fn a_transaction_reads_its_own_writes_and_others_read_them_after_its_commit() {
    on_nodes(3, async |nodes| {
        create(&nodes, 3, 2).await;
        let (mut one, mut other) = (Client::open(&nodes, 3).await, Client::open(&nodes, 3).await);
        assert_eq!(one.get(b"ada").await, Ok(None));
        one.txn.begin();
        one.txn.put(b"ada", b"1").expect("a short pair");
        one.txn.put(b"bob", b"2").expect("a short pair");
        assert_eq!(one.txn.get(b"ada").await, Ok(Some(&b"1"[..])));
        one.txn.delete(b"bob").expect("a short key");
        assert_eq!(one.txn.get(b"bob").await, Ok(None));
        let version = one.txn.commit().await.expect("nobody else is there").version;
        assert_eq!(other.get(b"ada").await, Ok(Some(b"1".to_vec())));
        assert_eq!(other.get(b"bob").await, Ok(None));
        other.txn.begin();
        assert_eq!(other.txn.read(b"ada").await.map(|read| read.version), Ok(version));
        other.put(&[(b"bob", &[7; 100])]).await.expect("nobody else is there");
        assert_eq!(one.get(b"bob").await, Ok(Some(vec![7; 100])));
        one.txn.begin();
        one.txn.delete(b"ada").expect("a short key");
        let deleted = one.txn.commit().await.expect("nobody else is there").version;
        assert!(deleted > version);
        assert_eq!(other.get(b"ada").await, Ok(None));
        assert_eq!(other.txn.put(b"a", &[0; 101]), Err(TxnError::ValueLength { len: 101, max: 100 }));
        assert_eq!(other.txn.put(&[1; 65], &[0; 100]), Err(TxnError::PairLength { len: 165, max: 164 }));
        one.close().await;
        other.close().await;
        let (_, stat) = settled(&nodes, 3).await.expect("it heals");
        assert_eq!(check(stat), Ok(()));
        assert_eq!((stat.keys, stat.values), (2, 1));
    });
}

#[test]
fn a_commit_waits_for_a_task_that_has_not_begun_and_fails_without_one() {
    on_nodes(1, async |nodes| {
        create(&nodes, 1, 0).await;
        let fabric = nodes.client().await;
        let described = members::open(&fabric, 1, STORE).await.expect("the store exists");
        let options = Options { entropy: 1 << 40, ..Options::NONE };
        let mut txn = FarmKind::open(Rc::clone(&fabric), &described, &options).await.expect("an id is free");
        txn.begin();
        txn.put(b"x", b"1").expect("a short pair");
        assert_eq!(txn.commit().await, Err(TxnError::NotKept { ran: Ran::No }));
        let (keeper, steered) = (txn.keeper(), fabric.inner());
        let world = steered.world.clone();
        steered.world.spawn(steered.process, async move {
            world.sleep(300_000).await;
            keeper.await;
        });
        txn.begin();
        txn.put(b"x", b"1").expect("a short pair");
        assert!(txn.commit().await.is_ok());
    });
}

#[test]
fn the_costs_are_those_of_the_paper() {
    for backups in [0, 1] {
        on_nodes(2, async move |nodes| {
            create(&nodes, 2, backups).await;
            let mut client = Client::open(&nodes, 2).await;
            let (here, there) = (keys_of(&client, 0, 8), keys_of(&client, 1, 1));
            for key in here.iter().chain(&there) {
                client.put(&[(key, b"0")]).await.expect("nobody else is there");
            }
            let (one, two, far) = (&here[0][..], &here[1][..], &there[0][..]);
            let all: Vec<&[u8]> = here.iter().map(Vec::as_slice).collect();
            let (record, two_records) = (u64::from(backups), 2 * u64::from(backups));
            // Reads, writes, round trips, chains, and calls. Reads of two members overlap, so the count of round trips
            // says nothing about them.
            type Case<'a> = (&'a [&'a [u8]], &'a [&'a [u8]], Option<u64>, [u64; 2]);
            let cases: [Case<'_>; 8] = [
                (&[one], &[], Some(2), [2, 0]),
                (&[one, two], &[], Some(3), [3, 0]),
                // Reads and writes: the index, the objects, locks, records, commits.
                (&[one], &[one], Some(4 + record), [2 + record, 2]),
                (&[one, two], &[one, two], Some(4 + record), [2 + record, 2]),
                (&[one, far], &[one, far], None, [4 + two_records, 4]),
                // One object is only read, and validated by a READ.
                (&[one, two], &[one], Some(5 + record), [3 + record, 2]),
                // Four are validated by READs, and more by a call.
                (&all[..5], &[one], Some(5 + record), [3 + record, 2]),
                (&all[..6], &[one], Some(5 + record), [2 + record, 3]),
            ];
            for (reads, writes, round_trips, wanted) in cases {
                // The client's task truncates the records of the transaction before.
                client.fabric.inner().world.sleep(7_100_000).await;
                client.fabric.take();
                client.update(reads, writes, b"1").await.expect("nobody else is there");
                let costs = client.fabric.take();
                let case = format!("{backups} backups: {} reads, {} writes", reads.len(), writes.len());
                assert_eq!([costs.requests, costs.calls], wanted, "{case}");
                let round_trips = round_trips.unwrap_or(costs.round_trips);
                assert_eq!(costs.round_trips, round_trips, "{case}");
            }
            client.close().await;
        });
    }
}

/// Lets two transactions, each of which writes what the other one reads, wait for each other before a request. Returns
/// how many have committed.
fn committed_of_two(before: Request) -> usize {
    on_nodes(1, async move |nodes| {
        create(&nodes, 1, 0).await;
        let mut clients = [Client::open(&nodes, 1).await, Client::open(&nodes, 1).await];
        clients[0].put(&[(b"x", b"0"), (b"y", b"0")]).await.expect("nobody else is there");
        let arrived = Rc::new(Cell::new(0));
        for client in &mut clients {
            client.txn.begin();
            client.txn.fetch(&[b"x", b"y"]).await.expect("nobody has a lock");
            let (arrived, world, has_met) = (Rc::clone(&arrived), nodes.world.clone(), Cell::new(false));
            client.fabric.inner().before_each(move |_, request| {
                let waits = request == before && !has_met.replace(has_met.get() || request == before);
                let (arrived, world) = (Rc::clone(&arrived), world.clone());
                async move {
                    if waits {
                        arrived.set(arrived.get() + 1);
                        while arrived.get() < 2 {
                            world.sleep(100).await;
                        }
                    }
                    Then::Runs
                }
            });
        }
        let [mut one, mut other] = clients;
        one.txn.put(b"x", b"1").expect("a short pair");
        other.txn.put(b"y", b"1").expect("a short pair");
        let outcome = Rc::new(Cell::new(None));
        let theirs = Rc::clone(&outcome);
        let steered = Rc::clone(other.fabric.inner());
        steered.world.clone().spawn(steered.process, async move {
            theirs.set(Some(other.txn.commit().await.is_ok()));
            other.close().await;
        });
        let ours = one.txn.commit().await.is_ok();
        while outcome.get().is_none() {
            nodes.world.sleep(1000).await;
        }
        one.fabric.inner().runs_all();
        one.close().await;
        usize::from(ours) + usize::from(outcome.get() == Some(true))
    })
}

#[test]
fn two_transactions_that_write_what_the_other_reads_do_not_both_commit() {
    assert_eq!(committed_of_two(Request::Reads), 0, "each finds the other's lock");
    assert!(committed_of_two(LOCK) < 2);
}

/// Has a transaction fail because one of its objects has another version. Returns what is left.
fn left_by_a_conflict() -> Stat {
    on_nodes(1, async |nodes| {
        create(&nodes, 1, 0).await;
        let (mut one, mut other) = (Client::open(&nodes, 1).await, Client::open(&nodes, 1).await);
        other.put(&[(b"x", b"0"), (b"y", b"0"), (b"z", b"0")]).await.expect("nobody else is there");
        one.txn.begin();
        one.txn.fetch(&[b"x", b"y", b"z"]).await.expect("nobody has a lock");
        other.put(&[(b"y", b"1")]).await.expect("nobody has a lock");
        for key in [b"x", b"y", b"z"] {
            one.txn.put(key, b"2").expect("a short pair");
        }
        assert_eq!(one.txn.commit().await, Err(TxnError::Conflict));
        other.txn.stat().await.expect("the node runs")
    })
}

#[test]
fn a_conflict_leaves_no_lock() {
    assert_eq!(check(left_by_a_conflict()), Ok(()));
}

/// Whether a transaction commits that has read one key before, and one after, another one that wrote both.
fn commits_inconsistent_reads() -> bool {
    on_nodes(1, async |nodes| {
        create(&nodes, 1, 0).await;
        let (mut one, mut other) = (Client::open(&nodes, 1).await, Client::open(&nodes, 1).await);
        other.put(&[(b"x", b"0"), (b"y", b"0")]).await.expect("nobody else is there");
        one.txn.begin();
        assert_eq!(one.txn.get(b"x").await, Ok(Some(&b"0"[..])));
        other.put(&[(b"x", b"1"), (b"y", b"1")]).await.expect("nobody else is there");
        assert_eq!(one.txn.get(b"y").await, Ok(Some(&b"1"[..])));
        one.txn.commit().await.is_ok()
    })
}

#[test]
fn values_of_a_doomed_transaction_are_not_returned_after_its_commit() {
    assert!(!commits_inconsistent_reads());
}

/// Number of READs of an object that were repeated, if the first one takes this time.
fn torn_reads(time: Duration) -> u64 {
    on_nodes(1, async move |nodes| {
        create(&nodes, 1, 0).await;
        let mut client = Client::open(&nodes, 1).await;
        client.put(&[(b"x", b"0")]).await.expect("nobody else is there");
        let reads = Cell::new(0);
        client.fabric.inner().before_each(move |_, request| {
            reads.set(reads.get() + u32::from(request == Request::Reads));
            std::future::ready(if reads.get() == 2 { Then::Takes(time) } else { Then::Runs })
        });
        assert_eq!(client.get(b"x").await, Ok(Some(b"0".to_vec())));
        client.counter("torn reads")
    })
}

#[test]
fn a_read_that_takes_as_long_as_versions_need_to_wrap_is_repeated() {
    assert_eq!(torn_reads(Duration::from_millis(10)), 0);
    assert_eq!(torn_reads(Duration::from_millis(60)), 1);
}

/// Has a lock call arrive after its transaction was aborted. Returns what it leaves.
fn left_by_a_late_lock() -> Stat {
    on_nodes(1, async |nodes| {
        create(&nodes, 1, 0).await;
        let mut client = Client::open(&nodes, 1).await;
        client.put(&[(b"x", b"0")]).await.expect("nobody else is there");
        client.fabric.inner().before_each(|_, request| {
            std::future::ready(if request == LOCK { Then::Lost(Ran::Unknown) } else { Then::Runs })
        });
        let refused = client.update(&[b"x"], &[b"x"], b"1").await.expect_err("the lock call is lost");
        assert_eq!(refused.ran(), Ran::No);
        client.fabric.inner().runs_all();
        client.fabric.inner().repeat_lost_call().await;
        client.txn.stat().await.expect("the node runs")
    })
}

#[test]
fn a_lock_call_after_the_abort_locks_nothing() {
    assert_eq!(check(left_by_a_late_lock()), Ok(()));
}

/// Has the backup of two keys apply their records late. Returns what it leaves.
fn copies_after_late_truncation() -> Stat {
    on_nodes(2, async |nodes| {
        create(&nodes, 2, 1).await;
        let (mut one, mut other) = (Client::open(&nodes, 2).await, Client::open(&nodes, 2).await);
        let keys = keys_of(&one, 0, 2);
        let (x, y) = (&keys[0][..], &keys[1][..]);
        // The second record of the lane overwrites the first one at the backup.
        one.put(&[(x, b"1")]).await.expect("nobody else is there");
        one.put(&[(y, b"1")]).await.expect("nobody else is there");
        // The newer record of a key is applied before the older one.
        other.put(&[(y, b"2")]).await.expect("nobody else is there");
        other.close().await;
        one.close().await;
        settled(&nodes, 2).await.expect("it heals").1
    })
}

#[test]
fn backups_apply_every_record_and_keep_the_newest_value() {
    assert_eq!(check(copies_after_late_truncation()), Ok(()));
}

/// Kills a client before or after one of the requests of a transaction that reads one key and writes two, and checks
/// what others find. Returns whether the client has made so many requests.
fn die_at(request: u32, then: Then, backups: u8) -> Result<bool, String> {
    on_nodes(3, async move |nodes| {
        create(&nodes, 3, backups).await;
        let mut client = Client::open(&nodes, 3).await;
        let keys: Vec<Vec<u8>> = (0..3).map(|member| keys_of(&client, member, 1).remove(0)).collect();
        let (x, y, z) = (&keys[0][..], &keys[1][..], &keys[2][..]);
        client.put(&[(x, b"0"), (y, b"0"), (z, b"0")]).await.expect("nobody else is there");
        let requests = Rc::new(Cell::new(0));
        let counted = Rc::clone(&requests);
        client.fabric.inner().before_each(move |_, _| {
            counted.set(counted.get() + 1);
            std::future::ready(match counted.get().cmp(&request) {
                std::cmp::Ordering::Less => Then::Runs,
                std::cmp::Ordering::Equal => then,
                std::cmp::Ordering::Greater => Then::Stops,
            })
        });
        let (process, outcome) = (client.fabric.inner().process, Rc::new(RefCell::new(None)));
        let (theirs, theirs_keys) = (Rc::clone(&outcome), keys.clone());
        nodes.world.spawn(process, async move {
            let [x, y, z] = [0, 1, 2].map(|number| &theirs_keys[number][..]);
            *theirs.borrow_mut() = Some(client.update(&[x, y, z], &[x, y], b"1").await);
            std::future::pending().await
        });
        // Shorter than a lease: the client must not lose it before it dies.
        nodes.world.sleep(400_000).await;
        nodes.world.kill(process);
        let has_died = requests.get() >= request;
        let (mut other, stat) = settled(&nodes, 3).await?;
        check(stat)?;
        let found = [other.get(x).await, other.get(y).await].map(|got| got.expect("no lock is left"));
        let is_new = found == [Some(b"1".to_vec()), Some(b"1".to_vec())];
        let is_old = found == [Some(b"0".to_vec()), Some(b"0".to_vec())];
        let committed = outcome.borrow().as_ref().map(Result::is_ok);
        let is_possible = match committed {
            Some(true) => is_new,
            Some(false) => is_old,
            None => is_new || is_old,
        };
        if !is_possible {
            return Err(format!("{committed:?}, and others find {found:?}"));
        }
        // The next holder of the id, and others, can go on.
        other.update(&[x, y, z], &[x, y, z], b"2").await.map_err(|error| error.to_string())?;
        other.close().await;
        check(settled(&nodes, 3).await?.1)?;
        Ok(has_died)
    })
}

/// Kills a client at each request of a transaction.
///
/// # Errors
/// What others find is wrong.
fn die_everywhere() -> Result<u32, String> {
    let mut deaths = 0;
    for backups in [0, 1, 2] {
        for then in [Then::Stops, Then::RunsLast] {
            for request in 1.. {
                let has_died = die_at(request, then, backups)
                    .map_err(|what| format!("{backups} backups, request {request}, {then:?}: {what}"))?;
                if !has_died {
                    break;
                }
                deaths += 1;
            }
        }
    }
    Ok(deaths)
}

#[test]
fn a_client_may_die_at_any_request() {
    let deaths = die_everywhere().unwrap_or_else(|what| panic!("{what}"));
    // 6 READs, 2 locks, 1 validation and 2 commits, and 2 records for each number of backups.
    assert!(deaths >= 2 * (3 * 11 + 2 + 4), "{deaths} deaths");
}

/// Has the only backup stop answering before it gets the record, and kills the client. Returns the value of the key.
fn value_without_a_record() -> Option<Vec<u8>> {
    on_nodes(2, async |nodes| {
        create(&nodes, 2, 1).await;
        let mut client = Client::open(&nodes, 2).await;
        let x = keys_of(&client, 0, 1).remove(0);
        client.put(&[(&x, b"0")]).await.expect("nobody else is there");
        client.fabric.inner().before_each(|_, request| {
            std::future::ready(if request == Request::Writes { Then::Stops } else { Then::Runs })
        });
        let (process, key) = (client.fabric.inner().process, x.clone());
        nodes.world.spawn(process, async move {
            let _never = client.update(&[&key], &[&key], b"1").await;
        });
        nodes.world.sleep(400_000).await;
        nodes.world.kill(process);
        let (mut other, _) = settled(&nodes, 2).await.expect("it heals");
        other.get(&x).await.expect("no lock is left")
    })
}

#[test]
fn no_value_is_visible_before_all_backups_have_the_record() {
    assert_eq!(value_without_a_record(), Some(b"0".to_vec()));
}

/// Has a recoverer look at the lanes of a dead client after another one has recovered it, and the next holder of the id
/// has taken locks. Returns the outcome of that holder's transaction.
fn outcome_beside_a_late_recoverer() -> Result<(), TxnError> {
    on_nodes(1, async |nodes| {
        create_for(&nodes, 1, 0, 1).await;
        let mut dead = Client::open(&nodes, 1).await;
        dead.put(&[(b"x", b"0")]).await.expect("nobody else is there");
        nodes.world.kill(dead.fabric.inner().process);
        // 1: the late recoverer has fenced the dead client; 2: the next holder has locks; 3: the recoverer is done.
        let stage = Rc::new(Cell::new(0));
        let wait = |from: u32, to: u32, wanted: Request| {
            let (stage, world) = (Rc::clone(&stage), nodes.world.clone());
            move |_: NodeId, request: Request| {
                let (stage, world) = (Rc::clone(&stage), world.clone());
                async move {
                    if request == wanted {
                        stage.set(stage.get().max(from));
                        while stage.get() < to {
                            world.sleep(1000).await;
                        }
                    }
                    Then::Runs
                }
            }
        };
        let recoverer = nodes.client().await;
        recoverer.inner().before_each(wait(1, 2, LOOK));
        let described = members::open(&recoverer, 1, STORE).await.expect("the store exists");
        let (process, done) = (recoverer.inner().process, Rc::clone(&stage));
        nodes.world.spawn(process, async move {
            let _recovered = registry::heal(recoverer, &described, &Options::NONE).await;
            done.set(3);
        });
        while stage.get() < 1 {
            nodes.world.sleep(1000).await;
        }
        let mut next = Client::open(&nodes, 1).await;
        next.fabric.inner().before_each(wait(2, 3, COMMIT));
        next.update(&[b"x"], &[b"x"], b"1").await
    })
}

#[test]
fn a_late_recoverer_leaves_the_next_holder_of_the_id_alone() {
    assert_eq!(outcome_beside_a_late_recoverer(), Ok(()));
}

/// Has two recoverers meet a transaction whose object lies at node 1, and whose record only the backup at node 0 has.
/// The first one looks at nodes 1 and 2 before the second one copies the record to node 2, and at node 0 after the
/// second one has truncated the record there, and has died before it truncates the copy. Checks what is left, and
/// whether the id can be leased.
fn outcome_beside_a_dead_recoverer() -> Result<(), String> {
    on_nodes(3, async |nodes| {
        create_for(&nodes, 3, 2, 1).await;
        let mut dead = Client::open(&nodes, 3).await;
        let x = keys_of(&dead, 1, 1).remove(0);
        dead.put(&[(&x, b"0")]).await.expect("nobody else is there");
        dead.fabric.inner().before_each(|node: NodeId, request: Request| {
            let is_second_record = (node, request) == (NodeId(2), Request::Writes);
            std::future::ready(if is_second_record { Then::Stops } else { Then::Runs })
        });
        let (process, key) = (dead.fabric.inner().process, x.clone());
        nodes.world.spawn(process, async move {
            let _never = dead.update(&[], &[&key], b"1").await;
        });
        nodes.world.sleep(400_000).await;
        nodes.world.kill(process);
        // 1: the first recoverer has looked at nodes 1 and 2; 2: the second one is dead; 3: the first one is done.
        let stage = Rc::new(Cell::new(0));
        let (first, second) = (nodes.client().await, nodes.client().await);
        let of_first = members::open(&first, 3, STORE).await.expect("the store exists");
        let of_second = members::open(&second, 3, STORE).await.expect("the store exists");
        let (theirs, world) = (Rc::clone(&stage), nodes.world.clone());
        first.inner().before_each(move |node: NodeId, request: Request| {
            let (stage, world) = (Rc::clone(&theirs), world.clone());
            async move {
                if (node, request) == (NodeId(0), LOOK) {
                    // The other looks are answered meanwhile.
                    world.sleep(100_000).await;
                    stage.set(stage.get().max(1));
                    while stage.get() < 2 {
                        world.sleep(1000).await;
                    }
                }
                Then::Runs
            }
        });
        let (process, theirs) = (first.inner().process, Rc::clone(&stage));
        let healed = Rc::new(RefCell::new(None));
        let outcome = Rc::clone(&healed);
        nodes.world.spawn(process, async move {
            *outcome.borrow_mut() = Some(registry::heal(first, &of_first, &Options::NONE).await);
            theirs.set(3);
        });
        while stage.get() < 1 {
            nodes.world.sleep(1000).await;
        }
        let has_stopped = Rc::new(Cell::new(false));
        let stopped = Rc::clone(&has_stopped);
        second.inner().before_each(move |node: NodeId, request: Request| {
            let is_last = (node, request) == (NodeId(2), TRUNCATE);
            stopped.set(stopped.get() || is_last);
            std::future::ready(if is_last { Then::Stops } else { Then::Runs })
        });
        let process = second.inner().process;
        nodes.world.spawn(process, async move {
            let _never = registry::heal(second, &of_second, &Options::NONE).await;
        });
        while !has_stopped.get() {
            nodes.world.sleep(1000).await;
        }
        // The other truncations are answered meanwhile.
        nodes.world.sleep(400_000).await;
        nodes.world.kill(process);
        stage.set(2);
        while stage.get() < 3 {
            nodes.world.sleep(1000).await;
        }
        let done = healed.take().expect("the first recoverer is done").map_err(|error| error.to_string())?;
        let (mut other, stat) = settled(&nodes, 3).await?;
        check(stat)?;
        let found = other.get(&x).await.expect("no lock is left");
        match found == Some(b"1".to_vec()) {
            true if done == ["recovered 1 dead clients: completed 1 of their transactions and aborted 0"] => {
                Ok(())
            }
            _ => Err(format!("the first recoverer has done {done:?}, and others find {found:?}")),
        }
    })
}

#[test]
fn a_record_that_a_dead_recoverer_has_copied_is_not_left() {
    assert_eq!(outcome_beside_a_dead_recoverer(), Ok(()));
}

/// Has a recoverer look at the lanes of a dead client once before another one has recovered the client. From then on,
/// the next holder of the id commits a transaction before each further look, up to this number, so that no two looks
/// find the same. Returns the number of looks, and what the recoverer reports.
fn looks_beside_a_busy_holder(transactions: u32) -> (u32, Vec<String>) {
    on_nodes(1, async move |nodes| {
        create_for(&nodes, 1, 0, 1).await;
        let mut dead = Client::open(&nodes, 1).await;
        dead.put(&[(b"x", b"0")]).await.expect("nobody else is there");
        nodes.world.kill(dead.fabric.inner().process);
        let (looks, commits) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        let late = nodes.client().await;
        let (looked, committed, world) = (Rc::clone(&looks), Rc::clone(&commits), nodes.world.clone());
        late.inner().before_each(move |_: NodeId, request: Request| {
            let (committed, world) = (Rc::clone(&committed), world.clone());
            let look = (request == LOOK).then(|| {
                looked.set(looked.get() + 1);
                looked.get()
            });
            async move {
                while look.is_some_and(|look: u32| committed.get() < (look - 1).min(transactions)) {
                    world.sleep(1000).await;
                }
                Then::Runs
            }
        });
        let described = members::open(&late, 1, STORE).await.expect("the store exists");
        let (process, healed) = (late.inner().process, Rc::new(RefCell::new(None)));
        let outcome = Rc::clone(&healed);
        nodes.world.spawn(process, async move {
            *outcome.borrow_mut() = Some(registry::heal(late, &described, &Options::NONE).await);
        });
        // The second look waits.
        while looks.get() < 2 {
            nodes.world.sleep(1000).await;
        }
        let mut next = Client::open(&nodes, 1).await;
        for number in 1..=transactions {
            next.put(&[(b"x", &number.to_le_bytes())]).await.expect("the id is leased");
            commits.set(number);
            while looks.get() <= number + 1 && healed.borrow().is_none() {
                nodes.world.sleep(1000).await;
            }
        }
        while healed.borrow().is_none() {
            nodes.world.sleep(1000).await;
        }
        let healed = healed.take().expect("the recoverer is done").expect("no node fails");
        assert_eq!(next.get(b"x").await, Ok(Some(transactions.to_le_bytes().to_vec())));
        (looks.get(), healed)
    })
}

#[test]
fn a_recoverer_stops_looking_once_another_one_has_released_the_id() {
    assert_eq!(looks_beside_a_busy_holder(10), (2, Vec::new()));
}

/// Has a client heal the store while the node stands still for longer than a lease. The node then carries out the
/// recoverer's second look at the lease of another client just before the renewal of this lease. Returns the outcome of
/// that client's next transaction.
fn outcome_beside_a_stalled_node() -> Result<(), TxnError> {
    on_nodes(1, async |nodes| {
        create(&nodes, 1, 0).await;
        let mut client = Client::open(&nodes, 1).await;
        let is_served = Rc::new(Cell::new(false));
        let (world, served) = (nodes.world.clone(), Rc::clone(&is_served));
        client.fabric.inner().before_each(move |_: NodeId, _| {
            let (world, served) = (world.clone(), Rc::clone(&served));
            async move {
                while !served.get() {
                    world.sleep(1000).await;
                }
                Then::Runs
            }
        });
        let recoverer = nodes.client().await;
        // The recoverer first looks at the leases of all ids, and then at those that somebody has.
        let (looks, ids) = (Cell::new(0), 4);
        let world = nodes.world.clone();
        recoverer.inner().before_each(move |_: NodeId, _| {
            looks.set(looks.get() + 1);
            let (world, served, is_second) = (world.clone(), Rc::clone(&is_served), looks.get() == ids + 1);
            async move {
                if is_second {
                    world.sleep(LEASE.as_nanos() as u64).await;
                    served.set(true);
                }
                Then::Runs
            }
        });
        let described = members::open(&recoverer, 1, STORE).await.expect("the store exists");
        let healed = registry::heal(recoverer, &described, &Options::NONE).await;
        assert_eq!(healed, Ok(Vec::new()));
        client.update(&[b"x"], &[b"x"], b"1").await
    })
}

#[test]
fn a_client_whose_renewal_waits_behind_a_look_at_its_lease_is_not_fenced() {
    assert_eq!(outcome_beside_a_stalled_node(), Ok(()));
}

/// Loses the response of each request of a transaction in turn. Checks what the client is told.
///
/// # Errors
/// What is wrong.
fn lose_everywhere(backups: u8) -> Result<(), String> {
    for ran in [Ran::Yes, Ran::No, Ran::Unknown] {
        for request in 1..16 {
            let outcome: Result<(), String> = on_nodes(2, async move |nodes| {
                create(&nodes, 2, backups).await;
                let mut client = Client::open(&nodes, 2).await;
                let (x, y) = (keys_of(&client, 0, 1).remove(0), keys_of(&client, 1, 1).remove(0));
                client.put(&[(&x, b"0"), (&y, b"0")]).await.expect("nobody else is there");
                let counted = Cell::new(0);
                client.fabric.inner().before_each(move |_: NodeId, _| {
                    counted.set(counted.get() + 1);
                    std::future::ready(if counted.get() == request { Then::Lost(ran) } else { Then::Runs })
                });
                let outcome = client.update(&[&x, &y], &[&x, &y], b"1").await;
                client.fabric.inner().runs_all();
                client.close().await;
                let (mut other, stat) = settled(&nodes, 2).await?;
                check(stat)?;
                let found = [other.get(&x).await, other.get(&y).await];
                let is_new = found == [Ok(Some(b"1".to_vec())), Ok(Some(b"1".to_vec()))];
                let is_old = found == [Ok(Some(b"0".to_vec())), Ok(Some(b"0".to_vec()))];
                let is_right = match &outcome {
                    Ok(()) => is_new,
                    Err(error) if error.ran() == Ran::No => is_old,
                    Err(_) => is_new || is_old,
                };
                match is_right {
                    true => Ok(()),
                    false => Err(format!("{outcome:?}, and others find {found:?}")),
                }
            });
            outcome.map_err(|what| format!("request {request}, {ran:?}: {what}"))?;
        }
    }
    Ok(())
}

#[test]
fn a_client_is_told_the_truth_if_a_response_is_lost() {
    for backups in [0, 1] {
        lose_everywhere(backups).unwrap_or_else(|what| panic!("{backups} backups: {what}"));
    }
}

#[cfg(farside_mutants)]
#[test]
fn these_tests_find_broken_variants() {
    use farside_remote::mutant::Mutant;
    use farside_systems::lease;
    use farside_systems::txn::farm::mutants;
    let under = |mutant: Mutant, test: &dyn Fn() -> bool| {
        Mutant::switch(Some(mutant));
        let passes = std::panic::catch_unwind(std::panic::AssertUnwindSafe(test)).unwrap_or(false);
        Mutant::switch(None);
        assert!(!passes, "{mutant:?} lives");
    };
    under(mutants::LOCK_IGNORED, &|| committed_of_two(Request::Reads) < 2);
    under(mutants::VALIDATED_EARLY, &|| committed_of_two(LOCK) < 2);
    under(mutants::LOCK_LEFT, &|| check(left_by_a_conflict()).is_ok());
    under(mutants::DOOMED_RETURNED, &|| !commits_inconsistent_reads());
    under(mutants::WRAP_ACCEPTED, &|| torn_reads(Duration::from_millis(60)) == 1);
    under(mutants::LATE_LOCK_GRANTED, &|| check(left_by_a_late_lock()).is_ok());
    under(mutants::RECORD_OVERWRITTEN, &|| check(copies_after_late_truncation()).is_ok());
    under(mutants::OLDER_APPLIED, &|| check(copies_after_late_truncation()).is_ok());
    under(mutants::PRIMARY_BEFORE_BACKUPS, &|| value_without_a_record() == Some(b"0".to_vec()));
    under(lease::mutants::WAIT_COUNTED, &|| outcome_beside_a_stalled_node().is_ok());
    under(mutants::LEASE_UNCONFIRMED, &|| outcome_beside_a_late_recoverer().is_ok());
    under(mutants::LOOKED_ONCE, &|| outcome_beside_a_dead_recoverer().is_ok());
    under(mutants::LOOKED_ON, &|| looks_beside_a_busy_holder(10).0 == 2);
    under(mutants::RECORD_IGNORED, &|| die_everywhere().is_ok());
    under(mutants::RECORD_UNCOPIED, &|| die_everywhere().is_ok());
    under(mutants::DONE_IGNORED, &|| die_everywhere().is_ok());
}
