//! Tests of what the sessions of all transactional stores have in common.

use crate::support::steered::{Then, on_nodes};
use farside_remote::NodeId;
use farside_remote::draws::Draws;
use farside_systems::members::{self, New};
use farside_systems::registry::AnyTxn;
use farside_systems::store::StoreError;
use farside_systems::system::{Options, Sizing};
use farside_systems::txn::retry::{self, Attempts};
use farside_systems::txn::{Transacting, Txn, TxnError, farm, fasst, prism_tx};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const STORE: &str = "s";
const LEASE: Duration = Duration::from_millis(20);

/// Opens a store whose only id has a dead client. Once the lease has expired, each request takes so long that the
/// recovery takes longer than a new client waits for an id.
fn opened_after_a_long_recovery(kind: &'static str) -> Result<(), StoreError> {
    on_nodes(1, async move |nodes| {
        let transacting = Transacting { ids: Some(1), lanes: Some(1), ..Transacting::NONE };
        let sizing =
            Sizing { items: Some(40), value_len: 100, lease: Some(LEASE), transacting, ..Sizing::default() };
        let new = New { name: STORE.into(), kind: kind.into(), sizing, quota: 4 << 20, members: 1 };
        let dead = nodes.client().await;
        members::create(&dead, 1, &new, [1, 2]).await.expect("the node has memory");
        let options = |entropy: u64| Options { entropy, ..Options::NONE };
        let opened = AnyTxn::open_in(Rc::clone(&dead), 1, STORE, &options(77)).await;
        drop(opened.expect("an id is free"));
        nodes.world.kill(dead.inner().process);

        let next = nodes.client().await;
        let (world, begun) = (nodes.world.clone(), nodes.world.now());
        next.inner().before_each(move |_: NodeId, _| {
            let world = world.clone();
            async move {
                let lease = LEASE.as_nanos() as u64;
                if world.now() > begun + lease {
                    world.sleep(lease / 2).await;
                }
                Then::Runs
            }
        });
        AnyTxn::open_in(next, 1, STORE, &options(78)).await.map(drop)
    })
}

#[test]
fn a_client_gets_the_id_that_its_own_long_recovery_has_freed() {
    for kind in [farm::KIND, fasst::KIND, prism_tx::KIND] {
        assert_eq!(opened_after_a_long_recovery(kind), Ok(()), "{kind}");
    }
}

/// What a store has for keys that a dead client has locked.
struct AfterDeath {
    /// Outcome of a transaction on these keys with a hundred attempts.
    by_number: Result<u64, TxnError>,
    /// Outcome of one that is tried for [`retry::patience`], and the time that it took.
    by_time: Result<u64, TxnError>,
    took: Duration,
}

/// Kills a client with two locked keys. Another one then adds to the numbers that these keys have.
fn after_a_death(kind: &'static str, lease: Duration) -> AfterDeath {
    const KEYS: [&[u8]; 2] = [b"one", b"other"];

    /// Adds 1 to the number of each key, and returns the new number.
    async fn add<T: Txn>(txn: &mut T) -> Result<u64, TxnError> {
        txn.fetch(&KEYS).await?;
        let mut sum = 0;
        for key in KEYS {
            let bytes = txn.get(key).await?.expect("the first transaction has put it");
            sum = u64::from_be_bytes(bytes.try_into().expect("eight bytes")) + 1;
            txn.put(key, &sum.to_be_bytes())?;
        }
        Ok(sum)
    }

    on_nodes(1, async move |nodes| {
        let transacting = Transacting { ids: Some(4), lanes: Some(1), ..Transacting::NONE };
        let sizing =
            Sizing { items: Some(40), value_len: 100, lease: Some(lease), transacting, ..Sizing::default() };
        let new = New { name: STORE.into(), kind: kind.into(), sizing, quota: 4 << 20, members: 1 };
        let (victim, other) = (nodes.client().await, nodes.client().await);
        members::create(&victim, 1, &new, [1, 2]).await.expect("the node has memory");
        let options = |entropy: u64| Options { entropy, ..Options::NONE };
        let opened = AnyTxn::open_in(Rc::clone(&victim), 1, STORE, &options(77)).await;
        let mut dead = opened.expect("an id is free");
        let opened = AnyTxn::open_in(Rc::clone(&other), 1, STORE, &options(78)).await;
        let mut txn = opened.expect("an id is free");
        nodes.world.spawn(victim.inner().process, dead.keeper());
        nodes.world.spawn(other.inner().process, txn.keeper());
        txn.begin();
        KEYS.into_iter().for_each(|key| txn.put(key, &0u64.to_be_bytes()).expect("a valid value"));
        txn.commit().await.expect("nobody else writes");

        // Each request of the victim takes so long that the other client sees what the one before has locked.
        let is_slow = Rc::new(Cell::new(false));
        let (slow, world) = (Rc::clone(&is_slow), nodes.world.clone());
        victim.inner().before_each(move |_: NodeId, _| {
            let (world, is_slow) = (world.clone(), slow.get());
            async move {
                if is_slow {
                    world.sleep(1_000_000).await;
                }
                Then::Runs
            }
        });
        is_slow.set(true);
        nodes.world.spawn(victim.inner().process, async move {
            dead.begin();
            add(&mut dead).await.expect("nobody else writes");
            dead.commit().await.expect("nobody else writes");
        });
        while txn.left().await.expect("the node runs").unsettled < 2 {
            nodes.world.sleep(5_000).await;
        }
        nodes.world.kill(victim.inner().process);

        let (mut draws, by_hundred) = (Draws(1), Attempts { most: 100, ..Attempts::UNLIMITED });
        let by_number = retry::run(&mut txn, &other, &mut draws, by_hundred, add).await;
        let begun = nodes.world.now();
        let outlasting = Attempts::outlasting(txn.lease());
        let by_time = retry::run(&mut txn, &other, &mut draws, outlasting, add).await;
        let took = Duration::from_nanos(nodes.world.now() - begun);
        let [by_number, by_time] = [by_number, by_time].map(|done| done.map(|(sum, _)| sum));
        AfterDeath { by_number, by_time, took }
    })
}

#[test]
fn a_transaction_that_is_tried_for_long_enough_gets_the_keys_of_a_dead_client() {
    for kind in [farm::KIND, fasst::KIND, prism_tx::KIND] {
        for lease in [Duration::from_millis(500), Duration::from_secs(2)] {
            let AfterDeath { by_number, by_time, took } = after_a_death(kind, lease);
            println!("{kind}, leases of {lease:?}: {by_number:?}, then {by_time:?} after {took:?}");
            assert_eq!(
                by_number,
                Err(TxnError::Conflict),
                "{kind}: a hundred attempts are over before a lease"
            );
            assert!(by_time.is_ok(), "{kind}: {by_time:?}");
            assert!(took < retry::patience(lease), "{kind}: {took:?}");
        }
    }
}
