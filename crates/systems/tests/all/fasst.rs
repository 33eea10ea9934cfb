//! Tests of FaSST: results, costs, and interleavings that broken variants do not survive.

use crate::support::steered::{Nodes, Request, Steering, Then, on_nodes};
use crate::support::{Home, run};
use farside_remote::NodeId;
use farside_remote::draws::Draws;
use farside_remote::fabric::Ran;
use farside_systems::members::{self, New};
use farside_systems::registry;
use farside_systems::rpc::fasst::{Batch, Destination, FIRST_TYPE, REFUSED};
use farside_systems::store::{self, Member, Members};
use farside_systems::system::{Options, Sizing, System};
use farside_systems::txn::fasst::service::FasstKind;
use farside_systems::txn::fasst::{Fasst, KIND, Stat, request};
use farside_systems::txn::{Committed, Transacting, Txn, TxnError};
use std::cell::Cell;
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

pub(crate) const STORE: &str = "s";
/// Longer than each test's transactions: no renewal is among the requests that a test counts.
pub(crate) const LEASE: Duration = Duration::from_millis(20);
/// Packets, by their first request.
pub(crate) const LOCK: Request = Request::Call(request::LOCK);
pub(crate) const VALIDATE: Request = Request::Call(request::VALIDATE);
pub(crate) const LOG: Request = Request::Call(request::LOG);
pub(crate) const BACKUP: Request = Request::Call(request::BACKUP);
pub(crate) const COMMIT: Request = Request::Call(request::COMMIT);
const LOCK_GET: Request = Request::Call(request::LOCK_GET);

/// A client with its own task.
pub(crate) struct Client {
    pub(crate) fabric: Steering,
    pub(crate) txn: Fasst<Steering>,
    has_ended: Rc<Cell<bool>>,
}

pub(crate) async fn create(nodes: &Nodes, members: u32, backups: u8) {
    create_for(nodes, members, backups, 4, 40).await;
}

/// Creates a store with this number of client ids, for this number of items.
pub(crate) async fn create_for(nodes: &Nodes, members: u32, backups: u8, ids: u16, items: u64) {
    let transacting =
        Transacting { ids: Some(ids), lanes: Some(1), backups: Some(backups), ..Transacting::NONE };
    let sizing =
        Sizing { items: Some(items), value_len: 100, lease: Some(LEASE), transacting, ..Sizing::default() };
    let (quota, members_count) = ((u64::from(members) * 2) << 20, members as usize);
    let new = New { name: STORE.into(), kind: KIND.into(), sizing, quota, members: members_count };
    let fabric = nodes.client().await;
    members::create(&fabric, members, &new, [1, 2]).await.expect("the nodes have memory");
}

impl Client {
    pub(crate) async fn open(nodes: &Nodes, members: u32) -> Client {
        let fabric = nodes.client().await;
        fabric.inner().names_calls_by(FIRST_TYPE);
        let described = members::open(&fabric, members, STORE).await.expect("the store exists");
        let entropy = u64::from(fabric.inner().process.0) + 77;
        let options = Options { entropy, ..Options::NONE };
        let txn = FasstKind::open(Rc::clone(&fabric), &described, &options).await.expect("an id is free");
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

    pub(crate) async fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>, TxnError> {
        self.txn.begin();
        let value = self.txn.get(key).await?.map(<[u8]>::to_vec);
        self.txn.commit().await?;
        Ok(value)
    }

    /// Commits writes without reads.
    pub(crate) async fn put(&mut self, writes: &[(&[u8], &[u8])]) -> Result<Committed, TxnError> {
        self.txn.begin();
        for (key, value) in writes {
            self.txn.put(key, value)?;
        }
        self.txn.commit().await
    }

    /// Reads keys, and then writes other ones with this value.
    pub(crate) async fn update(
        &mut self,
        reads: &[&[u8]],
        writes: &[&[u8]],
        value: &[u8],
    ) -> Result<(), TxnError> {
        self.txn.begin();
        self.txn.fetch(reads).await?;
        for key in writes {
            self.txn.put(key, value)?;
        }
        self.txn.commit().await.map(drop)
    }

    /// Reads keys, of which it locks those `to_write`, and then writes some with this value.
    pub(crate) async fn update_locked(
        &mut self,
        to_write: &[&[u8]],
        to_read: &[&[u8]],
        writes: &[&[u8]],
        value: &[u8],
    ) -> Result<(), TxnError> {
        self.txn.begin();
        self.txn.fetch_to_write(to_write, to_read).await?;
        for key in writes {
            self.txn.put(key, value)?;
        }
        self.txn.commit().await.map(drop)
    }

    pub(crate) async fn close(self) {
        let Client { fabric, txn, has_ended } = self;
        drop(txn);
        while !has_ended.get() {
            fabric.inner().world.sleep(1000).await;
        }
    }

    /// Reads `x`, `y` and `z`, changes `x` and `y`, and deletes `v`.
    pub(crate) async fn change(&mut self, [x, y, z, v]: [&[u8]; 4]) -> Result<(), TxnError> {
        self.txn.begin();
        self.txn.fetch(&[x, y, z]).await?;
        self.txn.put(x, b"1")?;
        self.txn.put(y, b"1")?;
        self.txn.delete(v)?;
        self.txn.commit().await.map(drop)
    }

    /// Does the same under locks of `x`, `y` and `z`, that of the latter in vain.
    pub(crate) async fn change_locked(&mut self, [x, y, z, v]: [&[u8]; 4]) -> Result<(), TxnError> {
        self.txn.begin();
        assert!(self.txn.get(z).await?.is_some());
        self.txn.fetch_to_write(&[x, y, z], &[]).await?;
        self.txn.put(x, b"1")?;
        self.txn.put(y, b"1")?;
        self.txn.delete(v)?;
        self.txn.commit().await.map(drop)
    }
}

/// Returns keys with a prefix, of which the first `count` belong to the given member.
pub(crate) fn keys_of(client: &Client, member: usize, count: usize) -> Vec<Vec<u8>> {
    let keys = (0_u32..).map(|number| format!("k{number}").into_bytes());
    keys.filter(|key| client.txn.member_of(key) == member).take(count).collect()
}

/// Heals the store, and returns what is left.
pub(crate) async fn settled(nodes: &Nodes, members: u32) -> Result<(Client, Stat), String> {
    let fabric = nodes.client().await;
    let described = members::open(&fabric, members, STORE).await.map_err(|error| error.to_string())?;
    registry::heal(fabric, &described, &Options::NONE).await.map_err(|error| error.to_string())?;
    let client = Client::open(nodes, members).await;
    let stat = client.txn.stat().await.map_err(|error| error.to_string())?;
    Ok((client, stat))
}

/// # Errors
/// Something is left of a transaction.
pub(crate) fn check(stat: Stat) -> Result<(), String> {
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
        let mut txn = FasstKind::open(Rc::clone(&fabric), &described, &options).await.expect("an id is free");
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
            let (here, there) = (keys_of(&client, 0, 12), keys_of(&client, 1, 1));
            for key in here.iter().chain(&there) {
                client.put(&[(key, b"0")]).await.expect("nobody else is there");
            }
            let (one, far) = (&here[0][..], &there[0][..]);
            let all: Vec<&[u8]> = here.iter().map(Vec::as_slice).collect();
            let more = u64::from(backups);
            // Reads, writes, round trips, and packets.
            type Case<'a> = (&'a [&'a [u8]], &'a [&'a [u8]], u64, u64);
            let cases: [Case<'_>; 8] = [
                (&[one], &[], 1, 1),
                // Gets of 12 keys share a packet, and so do the validations of their buckets.
                (&all, &[], 2, 2),
                (&[one, far], &[], 2, 4),
                // Lock, log at each log, backups, commit.
                (&[], &[one], 3 + more, 3 + 2 * more),
                (&[one], &[one], 4 + more, 4 + 2 * more),
                (&all, &all, 4 + more, 4 + 2 * more),
                // Some buckets are only read, and validated.
                (&all, &[one], 5 + more, 5 + 2 * more),
                (&[one, far], &[one, far], 4 + more, 2 + 2 + (1 + more) + 2 * more + 2),
            ];
            for (reads, writes, round_trips, packets) in cases {
                // The client's task closes the record of the transaction before.
                client.fabric.inner().world.sleep(7_100_000).await;
                client.fabric.take();
                client.update(reads, writes, b"1").await.expect("nobody else is there");
                let costs = client.fabric.take();
                let case = format!("{backups} backups: {} reads, {} writes", reads.len(), writes.len());
                assert_eq!([costs.requests, costs.calls], [0, packets], "{case}");
                assert_eq!(costs.round_trips, round_trips, "{case}");
            }
            // Reads to write, other reads, writes, round trips, and packets.
            type Locked<'a> = (&'a [&'a [u8]], &'a [&'a [u8]], &'a [&'a [u8]], u64, u64);
            let locked: [Locked<'_>; 8] = [
                // Lock and get, log at each log, backups, commit.
                (&[one], &[], &[one], 3 + more, 3 + 2 * more),
                (&all, &[], &all, 3 + more, 3 + 2 * more),
                (&[one, far], &[], &[one, far], 3 + more, 2 + (1 + more) + 2 * more + 2),
                // The other buckets are validated.
                (&[one], &all, &[one], 4 + more, 4 + 2 * more),
                (&[one], &[far], &[one], 4 + more, 2 + 1 + (1 + more) + more + 1),
                // Some locks are freed without a write: by the commit, or by a packet of their own.
                (&all, &[], &[one], 3 + more, 3 + 2 * more),
                (&[one, far], &[], &[one], 3 + more, 2 + (1 + more) + more + 2),
                (&[one], &[], &[], 2, 2),
            ];
            for (to_write, to_read, writes, round_trips, packets) in locked {
                client.fabric.inner().world.sleep(7_100_000).await;
                client.fabric.take();
                let updated = client.update_locked(to_write, to_read, writes, b"1").await;
                updated.expect("nobody else is there");
                let costs = client.fabric.take();
                let [to_write, to_read, writes] = [to_write, to_read, writes].map(<[_]>::len);
                let case = format!("{backups} backups: {to_write} locked, {to_read} read, {writes} written");
                assert_eq!([costs.requests, costs.calls], [0, packets], "{case}");
                assert_eq!(costs.round_trips, round_trips, "{case}");
            }
            client.close().await;
        });
    }
}

#[test]
fn a_locked_key_is_read_once_and_others_of_its_bucket_are_read_under_the_lock() {
    on_nodes(1, async |nodes| {
        create_for(&nodes, 1, 0, 4, 4).await;
        let mut client = Client::open(&nodes, 1).await;
        client.put(&[(b"x", b"0"), (b"y", b"0"), (b"z", b"0")]).await.expect("nobody else is there");
        client.txn.begin();
        assert_eq!(client.txn.get(b"z").await, Ok(Some(&b"0"[..])));
        assert_eq!(client.txn.get_to_write(b"x").await, Ok(Some(&b"0"[..])));
        client.fabric.take();
        assert_eq!(client.txn.get_to_write(b"x").await, Ok(Some(&b"0"[..])));
        assert_eq!(client.txn.get(b"x").await, Ok(Some(&b"0"[..])));
        client.txn.put(b"w", b"1").expect("a short pair");
        assert_eq!(client.txn.get_to_write(b"w").await, Ok(Some(&b"1"[..])));
        assert_eq!(client.fabric.take().calls, 0, "nothing of these is asked again");
        // All keys belong to one bucket.
        assert_eq!(client.txn.get(b"y").await, Ok(Some(&b"0"[..])));
        assert_eq!(client.txn.get_to_write(b"z").await, Ok(Some(&b"0"[..])));
        assert_eq!(client.txn.get_to_write(b"v").await, Ok(None));
        client.txn.put(b"x", b"1").expect("a short pair");
        assert_eq!(client.txn.get_to_write(b"x").await, Ok(Some(&b"1"[..])));
        client.txn.delete(b"z").expect("a short key");
        assert_eq!(client.txn.get_to_write(b"z").await, Ok(None));
        client.txn.commit().await.expect("nobody else is there");
        for (key, value) in [(b"x", Some(b"1")), (b"y", Some(b"0")), (b"z", None), (b"w", Some(b"1"))] {
            assert_eq!(client.get(key).await, Ok(value.map(|value| value.to_vec())));
        }
    });
}

#[test]
fn new_keys_that_are_locked_at_different_times_get_different_places() {
    on_nodes(1, async |nodes| {
        create_for(&nodes, 1, 0, 4, 4).await;
        let mut client = Client::open(&nodes, 1).await;
        let keys: Vec<Vec<u8>> = (0..28).map(|number| format!("k{number}").into_bytes()).collect();
        let names: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        client.txn.begin();
        // By one call of several batches, by another one, and by the commit.
        client.txn.fetch_to_write(&names[..20], &[]).await.expect("nobody else is there");
        client.txn.fetch_to_write(&names[18..22], &[]).await.expect("nobody else is there");
        for key in &names {
            client.txn.put(key, key).expect("a short pair");
        }
        client.txn.commit().await.expect("a bucket and 3 extra buckets have 7 slots each");
        client.txn.begin();
        client.txn.fetch(&names).await.expect("nobody else is there");
        for key in &names {
            assert_eq!(client.txn.get(key).await, Ok(Some(*key)));
        }
        client.txn.begin();
        assert_eq!(client.txn.get_to_write(b"new").await, Ok(None));
        client.txn.put(b"new", b"1").expect("a short pair");
        assert_eq!(client.txn.commit().await, Err(TxnError::TableFull));
        nodes.world.sleep(7_100_000).await;
        assert_eq!(check(client.txn.stat().await.expect("the node runs")), Ok(()));
    });
}

/// Lock and get, log, commit. A bucket has 7 slots.
const PACKETS_OF_INSERTS: [u64; 9] = [3, 3, 3, 3, 3, 3, 3, 4, 3];

/// Inserts keys into one bucket, one in each transaction. Before that, a transaction locks `locked_in_vain` other keys
/// of the bucket and writes none. Returns the number of packets of each insert.
fn packets_of_inserts(locked_in_vain: usize) -> Vec<u64> {
    on_nodes(1, async move |nodes| {
        create_for(&nodes, 1, 0, 4, 4).await;
        let mut client = Client::open(&nodes, 1).await;
        let absent: Vec<Vec<u8>> =
            (0..locked_in_vain).map(|number| format!("a{number}").into_bytes()).collect();
        let absent: Vec<&[u8]> = absent.iter().map(Vec::as_slice).collect();
        client.txn.begin();
        client.txn.fetch_to_write(&absent, &[]).await.expect("nobody else is there");
        client.txn.roll_back().await;
        let mut packets = Vec::new();
        for number in 0..9 {
            let key = format!("k{number}").into_bytes();
            client.fabric.take();
            client.update_locked(&[&key], &[], &[&key], b"1").await.expect("nobody else is there");
            packets.push(client.fabric.take().calls);
        }
        packets
    })
}

#[test]
fn only_an_insert_into_a_full_bucket_adds_an_extra_bucket_and_takes_one_packet_more() {
    assert_eq!(packets_of_inserts(0), PACKETS_OF_INSERTS);
    assert_eq!(packets_of_inserts(28), PACKETS_OF_INSERTS);
}

#[test]
fn a_transaction_cannot_lock_and_write_more_than_fits() {
    on_nodes(1, async |nodes| {
        create_for(&nodes, 1, 0, 4, 400).await;
        let mut client = Client::open(&nodes, 1).await;
        let (mut locked, mut written) = (0, 0);
        let error = loop {
            client.txn.begin();
            let keys = |from: &str, count: usize| -> Vec<Vec<u8>> {
                (0..count).map(|number| format!("{from}{number}").into_bytes()).collect()
            };
            let to_lock = keys("l", locked + 8);
            let to_lock: Vec<&[u8]> = to_lock.iter().map(Vec::as_slice).collect();
            if client.txn.fetch_to_write(&to_lock, &[]).await.is_err() {
                // As many are locked as can be. Each written key is one too many.
                client.txn.begin();
                client.txn.fetch_to_write(&to_lock[..locked], &[]).await.expect("it was possible before");
                for key in keys("w", 8) {
                    client.txn.put(&key, b"1").expect("a short pair");
                    written += 1;
                }
                break client.txn.commit().await;
            }
            locked += 8;
        };
        assert!(locked > 8 && written == 8);
        assert!(matches!(error, Err(TxnError::WritesLength { len, max }) if len > max), "{error:?}");
        nodes.world.sleep(7_100_000).await;
        assert_eq!(check(client.txn.stat().await.expect("the node runs")), Ok(()));
    });
}

#[test]
fn a_transaction_cannot_lock_more_than_it_can_write() {
    on_nodes(1, async |nodes| {
        create(&nodes, 1, 0).await;
        let mut client = Client::open(&nodes, 1).await;
        let keys: Vec<Vec<u8>> = (0..40).map(|number| vec![number as u8 + 1; 50]).collect();
        let names: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
        client.txn.begin();
        let refused = client.txn.fetch_to_write(&names, &[]).await;
        assert!(matches!(refused, Err(TxnError::WritesLength { .. })), "{refused:?}");
        client.txn.roll_back().await;
        assert_eq!(check(client.txn.stat().await.expect("the node runs")), Ok(()));
    });
}

/// Reads a key, has another client change it, and then locks it. Returns the sum that is stored.
fn sum_of_two_increments(locks_at_once: bool) -> u8 {
    on_nodes(1, async move |nodes| {
        create(&nodes, 1, 0).await;
        let (mut one, mut other) = (Client::open(&nodes, 1).await, Client::open(&nodes, 1).await);
        other.put(&[(b"x", &[0])]).await.expect("nobody else is there");
        let mut is_changed = false;
        loop {
            let done = async {
                one.txn.begin();
                if locks_at_once {
                    one.txn.get_to_write(b"x").await?;
                }
                let value = one.txn.get(b"x").await?.map_or(0, |value| value[0]);
                if !std::mem::replace(&mut is_changed, true) {
                    other.txn.begin();
                    match other.txn.get_to_write(b"x").await.map(|value| value.map(|value| value[0])) {
                        Ok(found) => {
                            other.txn.put(b"x", &[found.unwrap_or(0) + 1])?;
                            other.txn.commit().await?;
                        }
                        Err(error) => {
                            assert_eq!((error, locks_at_once), (TxnError::Conflict, true));
                            is_changed = false;
                        }
                    }
                }
                one.txn.get_to_write(b"x").await?;
                one.txn.put(b"x", &[value + 1])?;
                one.txn.commit().await.map(drop)
            };
            match done.await {
                Ok(()) if is_changed => break,
                Ok(()) => is_changed = true,
                Err(error) => assert_eq!(error, TxnError::Conflict),
            }
        }
        one.get(b"x").await.expect("nobody has a lock").expect("a sum")[0]
    })
}

#[test]
fn a_key_that_has_changed_since_it_was_read_is_not_locked() {
    assert_eq!(sum_of_two_increments(false), 2);
    assert_eq!(sum_of_two_increments(true), 2);
}

/// Outcome of a read that locks two keys of one bucket, which were read before: one before and one after another
/// transaction has written it.
fn locked_after_two_versions() -> Result<(), TxnError> {
    on_nodes(1, async |nodes| {
        create_for(&nodes, 1, 0, 4, 4).await;
        let (mut one, mut other) = (Client::open(&nodes, 1).await, Client::open(&nodes, 1).await);
        other.put(&[(b"a", b"0"), (b"b", b"0")]).await.expect("nobody else is there");
        one.txn.begin();
        assert_eq!(one.txn.get(b"b").await, Ok(Some(&b"0"[..])));
        other.put(&[(b"b", b"1")]).await.expect("nobody has locked it");
        assert_eq!(one.txn.get(b"a").await, Ok(Some(&b"0"[..])));
        one.txn.fetch_to_write(&[b"a", b"b"], &[]).await
    })
}

#[test]
fn a_bucket_that_was_read_at_two_versions_is_not_locked() {
    assert_eq!(locked_after_two_versions(), Err(TxnError::Conflict));
}

#[test]
fn a_key_that_was_absent_when_it_was_locked_is_inserted_by_nobody_else() {
    on_nodes(1, async |nodes| {
        create(&nodes, 1, 0).await;
        let (mut one, mut other) = (Client::open(&nodes, 1).await, Client::open(&nodes, 1).await);
        one.txn.begin();
        assert_eq!(one.txn.get_to_write(b"x").await, Ok(None));
        assert_eq!(other.put(&[(b"x", b"2")]).await, Err(TxnError::Conflict));
        assert_eq!(other.get(b"x").await, Err(TxnError::Conflict));
        one.txn.put(b"x", b"1").expect("a short pair");
        one.txn.commit().await.expect("it has the lock");
        assert_eq!(other.get(b"x").await, Ok(Some(b"1".to_vec())));
    });
}

#[test]
fn a_lock_that_is_freed_without_a_write_changes_no_version() {
    on_nodes(2, async |nodes| {
        create(&nodes, 2, 0).await;
        let (mut one, mut other) = (Client::open(&nodes, 2).await, Client::open(&nodes, 2).await);
        let (here, there) = (keys_of(&one, 0, 2), keys_of(&one, 1, 1));
        let [x, y, z] = [&here[0], &here[1], &there[0]].map(Vec::as_slice);
        other.put(&[(x, b"0"), (y, b"0"), (z, b"0")]).await.expect("nobody else is there");
        other.txn.begin();
        other.txn.fetch(&[x, y]).await.expect("nobody has a lock");
        one.update_locked(&[x], &[], &[], b"").await.expect("nobody has a lock");
        one.update_locked(&[x, y, z], &[], &[z], b"1").await.expect("nobody has a lock");
        other.txn.commit().await.expect("neither x nor y has changed");
    });
}

/// A way in which a program leaves a transaction that has locks.
#[derive(Clone, Copy, Debug)]
enum Leaves {
    Begins,
    RollsBack,
    DropsHandle,
    /// A plain read meets the lock of another transaction.
    IsDoomed,
    /// The read that locks is dropped while its packet is in flight.
    DropsRead,
    /// The writes are too long.
    WritesTooMuch,
}

const ALL_LEAVES: [Leaves; 6] = [
    Leaves::Begins,
    Leaves::RollsBack,
    Leaves::DropsHandle,
    Leaves::IsDoomed,
    Leaves::DropsRead,
    Leaves::WritesTooMuch,
];

/// Has a program leave a transaction that has locked a key. Returns what is left of it, while its client lives, and
/// whether another client and the same one can write the key.
fn left_by_a_leaver(leaves: Leaves) -> (Stat, bool) {
    on_nodes(2, async move |nodes| {
        create(&nodes, 2, 0).await;
        let (mut one, mut other) = (Client::open(&nodes, 2).await, Client::open(&nodes, 2).await);
        let (x, y) = (keys_of(&one, 0, 1).remove(0), keys_of(&one, 1, 1).remove(0));
        other.put(&[(&x, b"0"), (&y, b"0")]).await.expect("nobody else is there");
        nodes.world.sleep(7_100_000).await;
        let mut handle = one.txn.another();
        handle.begin();
        match leaves {
            Leaves::DropsRead => {
                let mut reading = pin!(handle.get_to_write(&x));
                let polled = poll_fn(|cx| Poll::Ready(reading.as_mut().poll(cx).is_ready())).await;
                assert!(!polled);
                // The client's task sends the packet.
                nodes.world.sleep(1).await;
            }
            _ => assert_eq!(handle.get_to_write(&x).await, Ok(Some(&b"0"[..]))),
        }
        match leaves {
            Leaves::Begins => handle.begin(),
            Leaves::RollsBack => {
                handle.roll_back().await;
                let stat = other.txn.stat().await.expect("the node runs");
                assert_eq!(check(stat), Ok(()), "the locks are free at once");
            }
            Leaves::DropsHandle => drop(handle),
            Leaves::IsDoomed => {
                other.txn.begin();
                other.txn.get_to_write(&y).await.expect("nobody has a lock");
                assert_eq!(handle.get(&y).await, Err(TxnError::Conflict));
                other.txn.roll_back().await;
            }
            Leaves::DropsRead => assert_eq!(handle.commit().await, Err(TxnError::Doomed)),
            Leaves::WritesTooMuch => {
                for number in 0..40_u8 {
                    handle.put(&[number], &[0; 100]).expect("a short pair");
                }
                let refused = handle.commit().await;
                assert!(matches!(refused, Err(TxnError::WritesLength { .. })), "{refused:?}");
            }
        }
        nodes.world.sleep(400_000).await;
        let stat = other.txn.stat().await.expect("the node runs");
        let are_written = other.put(&[(&x, b"1")]).await.is_ok() && one.put(&[(&x, b"2")]).await.is_ok();
        (stat, are_written)
    })
}

#[test]
fn a_transaction_that_its_program_leaves_keeps_no_lock() {
    for leaves in ALL_LEAVES {
        let (stat, are_written) = left_by_a_leaver(leaves);
        assert_eq!((check(stat), are_written), (Ok(()), true), "{leaves:?}");
    }
}

#[test]
fn tasks_with_fewer_lanes_than_there_are_tasks_take_turns() {
    on_nodes(1, async |nodes| {
        // One lane.
        create(&nodes, 1, 0).await;
        let mut client = Client::open(&nodes, 1).await;
        client.put(&[(b"x", &[0])]).await.expect("nobody else is there");
        let left = Rc::new(Cell::new(5));
        for task in 0..5_u64 {
            let (mut txn, left, world) = (client.txn.another(), Rc::clone(&left), nodes.world.clone());
            nodes.world.spawn(client.fabric.inner().process, async move {
                for round in 0..10 {
                    loop {
                        let done = async {
                            txn.begin();
                            let sum = txn.get_to_write(b"x").await?.map_or(0, |value| value[0]);
                            world.sleep(1000 * (task + round)).await;
                            txn.put(b"x", &[sum + 1])?;
                            txn.put(&[b'k', task as u8], b"1")?;
                            txn.commit().await
                        };
                        match done.await {
                            Ok(_) => break,
                            Err(error) => assert_eq!(error, TxnError::Conflict),
                        }
                    }
                }
                left.set(left.get() - 1);
            });
        }
        while left.get() > 0 {
            nodes.world.sleep(100_000).await;
        }
        assert_eq!(client.get(b"x").await, Ok(Some(vec![50])));
        client.close().await;
    });
}

#[test]
fn a_lock_lasts_while_its_client_lives_and_no_longer_than_its_lease_after_that() {
    on_nodes(1, async |nodes| {
        create(&nodes, 1, 0).await;
        let (mut one, mut other) = (Client::open(&nodes, 1).await, Client::open(&nodes, 1).await);
        other.put(&[(b"x", b"0")]).await.expect("nobody else is there");
        let sleeps = 10 * LEASE.as_nanos() as u64;
        for dies in [false, true] {
            one.txn.begin();
            one.txn.get_to_write(b"x").await.expect("nobody has a lock");
            assert_eq!(other.put(&[(b"x", b"1")]).await, Err(TxnError::Conflict));
            if dies {
                nodes.world.kill(one.fabric.inner().process);
            }
            nodes.world.sleep(sleeps).await;
            assert_eq!(other.put(&[(b"x", b"1")]).await.is_ok(), dies);
            if !dies {
                one.txn.put(b"x", b"2").expect("a short pair");
                one.txn.commit().await.expect("it has the lock");
            }
        }
        assert_eq!(other.get(b"x").await, Ok(Some(b"1".to_vec())));
    });
}

/// Lets two transactions, each of which writes what the other one reads, wait for each other before a packet. Returns
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
    assert_eq!(committed_of_two(VALIDATE), 0, "each finds the other's lock");
    assert!(committed_of_two(LOCK) < 2);
}

/// Has a transaction fail at one of its buckets. Returns what is left.
fn left_by_a_conflict() -> Stat {
    on_nodes(1, async |nodes| {
        create(&nodes, 1, 0).await;
        let (mut one, mut other) = (Client::open(&nodes, 1).await, Client::open(&nodes, 1).await);
        other.put(&[(b"x", b"0"), (b"y", b"0"), (b"z", b"0")]).await.expect("nobody else is there");
        other.fabric.inner().world.sleep(7_100_000).await;
        one.txn.begin();
        one.txn.fetch(&[b"x", b"y", b"z"]).await.expect("nobody has a lock");
        other.put(&[(b"y", b"1")]).await.expect("nobody has a lock");
        for key in [b"x", b"y", b"z"] {
            one.txn.put(key, b"2").expect("a short pair");
        }
        assert_eq!(one.txn.commit().await, Err(TxnError::Conflict));
        other.close().await;
        one.txn.stat().await.expect("the node runs")
    })
}

#[test]
fn a_conflict_leaves_no_lock() {
    assert_eq!(check(left_by_a_conflict()), Ok(()));
}

/// Fills a table until a new key has no room. Returns what is left.
fn left_by_a_full_table() -> Stat {
    on_nodes(1, async |nodes| {
        create_for(&nodes, 1, 0, 4, 4).await;
        let mut client = Client::open(&nodes, 1).await;
        let mut keys = 0;
        let refused = loop {
            match client.put(&[(format!("k{keys}").as_bytes(), b"0")]).await {
                Ok(_) => keys += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(
            (refused, keys),
            (TxnError::TableFull, 28),
            "a bucket and 3 extra buckets have 7 slots each"
        );
        assert_eq!(client.put(&[(b"k27", b"1"), (b"new", b"1")]).await, Err(TxnError::TableFull));
        nodes.world.sleep(7_100_000).await;
        let stat = client.txn.stat().await.expect("the node runs");
        if stat.locked == 0 {
            assert!(client.put(&[(b"k27", b"1")]).await.is_ok(), "a key with a slot can be written");
            client.close().await;
        }
        stat
    })
}

#[test]
fn a_key_without_room_leaves_no_lock() {
    assert_eq!(check(left_by_a_full_table()), Ok(()));
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

/// Whether a transaction commits that has found a key absent which another one has inserted meanwhile.
fn commits_beside_a_phantom() -> bool {
    on_nodes(1, async |nodes| {
        create(&nodes, 1, 0).await;
        let (mut one, mut other) = (Client::open(&nodes, 1).await, Client::open(&nodes, 1).await);
        one.txn.begin();
        assert_eq!(one.txn.get(b"x").await, Ok(None));
        other.put(&[(b"x", b"1")]).await.expect("nobody else is there");
        one.txn.put(b"y", b"1").expect("a short pair");
        one.txn.commit().await.is_ok()
    })
}

#[test]
fn a_key_that_was_absent_is_still_absent_when_the_transaction_commits() {
    assert!(!commits_beside_a_phantom());
}

/// Whether a transaction commits whose keys another one has locked, and freed without a change.
fn commits_after_an_abort() -> bool {
    on_nodes(1, async |nodes| {
        create(&nodes, 1, 0).await;
        let (mut one, mut other) = (Client::open(&nodes, 1).await, Client::open(&nodes, 1).await);
        other.put(&[(b"x", b"0"), (b"y", b"0")]).await.expect("nobody else is there");
        one.txn.begin();
        one.txn.fetch(&[b"x", b"y"]).await.expect("nobody has a lock");
        other.fabric.inner().before_each(|_, request| {
            std::future::ready(if request == LOG { Then::Lost(Ran::No) } else { Then::Runs })
        });
        other.put(&[(b"x", b"1"), (b"y", b"1")]).await.expect_err("no log answers");
        one.txn.commit().await.is_ok()
    })
}

#[test]
fn an_aborted_transaction_changes_no_version() {
    assert!(commits_after_an_abort());
}

/// Has a lock packet arrive after its transaction was aborted. Returns what it leaves.
fn left_by_a_late_lock(late: Request) -> Stat {
    on_nodes(1, async move |nodes| {
        create(&nodes, 1, 0).await;
        let mut client = Client::open(&nodes, 1).await;
        client.put(&[(b"x", b"0")]).await.expect("nobody else is there");
        client.fabric.inner().before_each(move |_, request| {
            std::future::ready(if request == late { Then::Lost(Ran::Unknown) } else { Then::Runs })
        });
        let refused = match late {
            LOCK => client.update(&[b"x"], &[b"x"], b"1").await,
            _ => client.update_locked(&[b"x"], &[], &[b"x"], b"1").await,
        };
        let refused = refused.expect_err("the lock packet is lost");
        assert_eq!(refused.ran(), Ran::No);
        client.fabric.inner().runs_all();
        client.fabric.inner().repeat_lost_call().await;
        nodes.world.sleep(7_100_000).await;
        client.txn.stat().await.expect("the node runs")
    })
}

#[test]
fn a_lock_packet_after_the_abort_locks_nothing() {
    for late in [LOCK, LOCK_GET] {
        assert_eq!(check(left_by_a_late_lock(late)), Ok(()), "{late:?}");
    }
}

/// Has a packet arrive again after another transaction has written the same key. Returns the key's value, and what is
/// left.
fn after_a_late_put(late: Request) -> (Option<Vec<u8>>, Stat) {
    on_nodes(2, async move |nodes| {
        create(&nodes, 2, 1).await;
        let (mut one, mut other) = (Client::open(&nodes, 2).await, Client::open(&nodes, 2).await);
        let x = keys_of(&one, 0, 1).remove(0);
        let is_lost = Cell::new(false);
        one.fabric.inner().before_each(move |_, request| {
            let loses = request == late && !is_lost.replace(is_lost.get() || request == late);
            std::future::ready(if loses { Then::Lost(Ran::Yes) } else { Then::Runs })
        });
        one.put(&[(&x, b"1")]).await.expect("the packet is repeated");
        other.put(&[(&x, b"2")]).await.expect("nobody else is there");
        one.fabric.inner().repeat_lost_call().await;
        nodes.world.sleep(7_100_000).await;
        let stat = other.txn.stat().await.expect("the nodes run");
        (other.get(&x).await.expect("nobody has a lock"), stat)
    })
}

#[test]
fn a_late_put_changes_nothing() {
    for late in [BACKUP, COMMIT] {
        let (value, stat) = after_a_late_put(late);
        assert_eq!((value, check(stat)), (Some(b"2".to_vec()), Ok(())), "{late:?}");
    }
}

/// Has the packet with the record of a dead client arrive after its recovery. Returns what it leaves.
fn left_by_a_packet_of_an_old_epoch() -> Stat {
    on_nodes(2, async |nodes| {
        create(&nodes, 2, 0).await;
        let mut client = Client::open(&nodes, 2).await;
        let (fabric, has_died) = (Rc::clone(&client.fabric), Rc::new(Cell::new(false)));
        let dies = Rc::clone(&has_died);
        fabric.inner().before_each(move |_, request| {
            std::future::ready(match (dies.get(), request) {
                (true, _) => Then::Stops,
                (false, LOG) => {
                    dies.set(true);
                    Then::Lost(Ran::Unknown)
                }
                (false, _) => Then::Runs,
            })
        });
        let other_process = nodes.client().await.inner().process;
        nodes.world.spawn(other_process, async move {
            let _never = client.put(&[(b"x", b"1")]).await;
        });
        while !has_died.get() {
            nodes.world.sleep(1000).await;
        }
        let (mut other, stat) = settled(&nodes, 2).await.expect("it heals");
        assert_eq!(check(stat), Ok(()));
        fabric.inner().repeat_lost_call().await;
        assert_eq!(other.get(b"x").await, Ok(None));
        other.txn.stat().await.expect("the nodes run")
    })
}

#[test]
fn a_packet_of_an_old_epoch_changes_nothing() {
    assert_eq!(check(left_by_a_packet_of_an_old_epoch()), Ok(()));
}

#[test]
fn a_lock_request_names_each_key_once_and_no_more_than_a_transaction_can_write() {
    on_nodes(1, async |nodes| {
        create_for(&nodes, 1, 0, 4, 4).await;
        let client = Client::open(&nodes, 1).await;
        let described = members::open(&client.fabric, 1, STORE).await.expect("the store exists");
        let Member { node, store, .. } = &described.list()[0];
        let to = Destination { node: *node, key: store.as_ref().expect("it is whole").extent().key };
        // The first transaction of the first lane of an id that nobody has, in the only bucket, at any version.
        let id = if client.txn.id() == 4 { 3_u16 } else { 4 };
        let first = 1_u64 << 18 | u64::from(id);
        let ask = async |keys: Vec<Vec<u8>>| {
            let mut batch = Batch::new(id, 0);
            batch.clear(0);
            let place = batch.push(to, request::LOCK, 40_000, |out| {
                [first, 0, u64::MAX, 0].iter().for_each(|word| out.extend(word.to_le_bytes()));
                for key in &keys {
                    out.extend((key.len() as u16).to_le_bytes());
                    out.extend(key);
                }
            });
            batch.send(&*client.fabric).await;
            batch.response(place.expect("it fits into a packet")).expect("the node answers").status
        };
        let keys = |count: u32| (0..count).map(|number| format!("k{number}").into_bytes()).collect();
        assert_eq!(ask(vec![b"x".to_vec(); 2]).await, REFUSED);
        assert_eq!(ask(vec![b"x".to_vec(); 10_000]).await, REFUSED);
        assert_eq!(ask(keys(5000)).await, REFUSED);
        let stat = client.txn.stat().await.expect("the node runs");
        assert_eq!((stat.keys, stat.locked), (0, 0));
        assert_eq!(ask(keys(20)).await, 0, "this one is a lock request like others");
        assert_eq!(client.txn.stat().await.expect("the node runs").locked, 1);
    });
}

/// Moves amounts between accounts, each time by a transaction of its own, in a store in this process. Returns the
/// number of transactions that were committed, and the sum of all accounts that the last one reads.
fn transfer(home: &Home, entropy: u64, transfers: u32) -> (u32, u64) {
    let endpoint = home.endpoint();
    let opening = async {
        let store = store::fetch_of(&endpoint, NodeId(0), STORE, KIND).await.expect("the store exists");
        let options = Options { entropy, ..Options::NONE };
        FasstKind::open(Rc::clone(&endpoint), &Members::one(NodeId(0), store), &options).await
    };
    let mut txn = run(&endpoint, opening).expect("an id is free");
    let keeper = txn.keeper();
    let account = |number: u64| number.to_be_bytes();
    let amount = |bytes: Option<&[u8]>| {
        bytes.map_or(1000, |bytes| u64::from_be_bytes(bytes.try_into().expect("eight bytes")))
    };
    let work = async {
        let (mut draws, mut committed) = (Draws(entropy), 0);
        while committed < transfers {
            let (from, to) = (draws.below(ACCOUNTS), draws.below(ACCOUNTS));
            txn.begin();
            let moved = async {
                match draws.below(2) {
                    0 => txn.fetch(&[&account(from), &account(to)]).await?,
                    _ => txn.fetch_to_write(&[&account(from), &account(to)], &[]).await?,
                }
                let [left, right] =
                    [amount(txn.get(&account(from)).await?), amount(txn.get(&account(to)).await?)];
                if from != to && left > 0 {
                    txn.put(&account(from), &(left - 1).to_be_bytes())?;
                    txn.put(&account(to), &(right + 1).to_be_bytes())?;
                }
                txn.commit().await
            };
            match moved.await {
                Ok(_) => committed += 1,
                Err(TxnError::Conflict) => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        }
        loop {
            txn.begin();
            let summed = async {
                let keys: Vec<[u8; 8]> = (0..ACCOUNTS).map(account).collect();
                txn.fetch(&keys.iter().map(|key| &key[..]).collect::<Vec<_>>()).await?;
                let mut sum = 0;
                for key in &keys {
                    sum += amount(txn.get(key).await?);
                }
                txn.commit().await?;
                Ok::<u64, TxnError>(sum)
            };
            match summed.await {
                Ok(sum) => return (committed, sum),
                Err(TxnError::Conflict) => std::thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        }
    };
    let (committed, sum) = run(&endpoint, async {
        let (mut work, mut keeper) = (pin!(work), pin!(keeper));
        poll_fn(|cx| {
            for _ in 0..2 {
                assert!(keeper.as_mut().poll(cx).is_pending(), "the client's task has ended");
                if let Poll::Ready(done) = work.as_mut().poll(cx) {
                    return Poll::Ready(done);
                }
            }
            Poll::Pending
        })
        .await
    });
    (committed, sum)
}

const ACCOUNTS: u64 = 6;

#[test]
fn transfers_of_several_threads_keep_the_sum() {
    let home = Home::new(16);
    // A lease that outlasts the test: its threads may get no CPU for a while.
    home.create_of(KIND, STORE, 8, r#"{"items":20,"ids":4,"lanes":2,"lease_us":60000000,"value_max":8}"#);
    let done = std::thread::scope(|scope| {
        let home = &home;
        let threads = [1_u64, 2, 3].map(|thread| scope.spawn(move || transfer(home, thread << 40, 300)));
        threads.map(|thread| thread.join().expect("a thread's transactions run"))
    });
    assert_eq!(done, [(300, 1000 * ACCOUNTS); 3]);
}

/// Loses the response of each packet of a transaction in turn. Checks what the client is told.
///
/// # Errors
/// What is wrong.
fn lose_everywhere(backups: u8, locks: bool) -> Result<(), String> {
    for ran in [Ran::Yes, Ran::No, Ran::Unknown] {
        for packet in 1..18 {
            let outcome: Result<(), String> = on_nodes(2, async move |nodes| {
                create(&nodes, 2, backups).await;
                let mut client = Client::open(&nodes, 2).await;
                let (x, y) = (keys_of(&client, 0, 1).remove(0), keys_of(&client, 1, 1).remove(0));
                client.put(&[(&x, b"0"), (&y, b"0")]).await.expect("nobody else is there");
                let counted = Cell::new(0);
                client.fabric.inner().before_each(move |_: NodeId, _| {
                    counted.set(counted.get() + 1);
                    std::future::ready(if counted.get() == packet { Then::Lost(ran) } else { Then::Runs })
                });
                let outcome = match locks {
                    true => client.update_locked(&[&x, &y], &[], &[&x, &y], b"1").await,
                    false => client.update(&[&x, &y], &[&x, &y], b"1").await,
                };
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
            outcome.map_err(|what| format!("packet {packet}, {ran:?}: {what}"))?;
        }
    }
    Ok(())
}

#[test]
fn a_client_is_told_the_truth_if_a_response_is_lost() {
    for (backups, locks) in [(0, false), (0, true), (1, false), (1, true)] {
        let lost = lose_everywhere(backups, locks);
        lost.unwrap_or_else(|what| panic!("{backups} backups, locks {locks}: {what}"));
    }
}

#[cfg(farside_mutants)]
#[test]
fn these_tests_find_broken_variants() {
    use farside_remote::mutant::Mutant;
    use farside_systems::txn::fasst::mutants;
    let under = |mutant: Mutant, test: &dyn Fn() -> bool| {
        Mutant::switch(Some(mutant));
        let passes = std::panic::catch_unwind(std::panic::AssertUnwindSafe(test)).unwrap_or(false);
        Mutant::switch(None);
        assert!(!passes, "{mutant:?} lives");
    };
    under(mutants::LOCK_IGNORED, &|| committed_of_two(VALIDATE) < 2);
    under(mutants::LOCK_LEFT, &|| check(left_by_a_full_table()).is_ok());
    under(mutants::ABORT_RAISES_VERSION, &commits_after_an_abort);
    under(mutants::PUT_REPLAYED, &|| after_a_late_put(COMMIT).0 == Some(b"2".to_vec()));
    under(mutants::PUT_REPLAYED, &|| check(after_a_late_put(BACKUP).1).is_ok());
    under(mutants::PHANTOM_ACCEPTED, &|| !commits_beside_a_phantom());
    under(mutants::LATE_LOCK_GRANTED, &|| check(left_by_a_late_lock(LOCK)).is_ok());
    under(mutants::LATE_LOCK_GRANTED, &|| check(left_by_a_late_lock(LOCK_GET)).is_ok());
    under(mutants::LOCK_UNCHECKED, &|| sum_of_two_increments(false) == 2);
    under(mutants::ABANDONED_LOCK_LEFT, &|| check(left_by_a_leaver(Leaves::Begins).0).is_ok());
    under(mutants::VERSIONS_MIXED, &|| locked_after_two_versions() == Err(TxnError::Conflict));
    under(mutants::READ_CHAINS, &|| packets_of_inserts(28) == PACKETS_OF_INSERTS);
    under(mutants::OLD_EPOCH_ACCEPTED, &|| check(left_by_a_packet_of_an_old_epoch()).is_ok());
}
