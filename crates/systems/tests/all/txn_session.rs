//! Tests of what the sessions of all transactional stores have in common.

use crate::support::steered::{Then, on_nodes};
use farside_remote::NodeId;
use farside_systems::members::{self, New};
use farside_systems::registry::AnyTxn;
use farside_systems::store::StoreError;
use farside_systems::system::{Options, Sizing};
use farside_systems::txn::{Transacting, farm, fasst, prism_tx};
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
