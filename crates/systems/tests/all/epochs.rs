//! Epochs and timestamps of one client at several members, some of which do not answer.

use crate::support::Home;
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::{Idle, Turns, block_on};
use farside_fabrics::local::{self, LocalNode};
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::fabric::ServiceId;
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, Memory, NodeId, Reply, Width};
use farside_systems::epoch::Epochs;
use farside_systems::lease::{ClientId, Lease, LeaseError, Leases, Table};
use farside_systems::raw::KIND;
use farside_systems::stamps::{StampError, Stamps};
use std::cell::Cell;
use std::num::NonZeroU64;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

const IDS: u16 = 4;

/// Sessions with several nodes, one of which may be down, and a clock that the test sets.
struct Members {
    homes: Vec<Home>,
    stores: Vec<Store>,
    endpoints: Vec<Direct>,
    down: Cell<Option<u32>>,
    capabilities: Cell<Capabilities>,
    now: Cell<Duration>,
    wall: Cell<Duration>,
}

impl Members {
    /// Starts nodes, each with a store of zeros whose first bytes serve as a table of leases.
    fn start(count: u32) -> Rc<Members> {
        let homes: Vec<Home> = (0..count).map(|_| Home::new(32)).collect();
        let connect = |(id, home): (usize, &Home)| {
            let node: Arc<dyn LocalNode> = Arc::clone(&home.host) as _;
            local::connect(&node, NodeId(id as u32)).expect("a session")
        };
        let stores: Vec<Store> = homes.iter().map(|home| home.create_of(KIND, "s", 16, "{}")).collect();
        let (now, wall) = (Duration::from_secs(1000), farside_fabrics::timer::wall());
        Rc::new(Members {
            stores,
            endpoints: homes.iter().enumerate().map(connect).collect(),
            homes,
            down: Cell::new(None),
            capabilities: Cell::new(Capabilities::SOFTWARE),
            now: Cell::new(now),
            wall: Cell::new(wall),
        })
    }

    fn leases(self: &Rc<Members>) -> Leases<Rc<Members>> {
        let table = |(node, store): (usize, &Store)| Table {
            node: NodeId(node as u32),
            key: store.extent().key,
            at: Addr::new(store.table_at),
        };
        Leases::new(Rc::clone(self), self.stores.iter().enumerate().map(table).collect(), IDS)
    }

    fn lease(self: &Rc<Members>, leases: &Leases<Rc<Members>>, nonce: u64) -> Lease {
        let lease = self.claim(leases, nonce);
        self.bind(leases, &lease);
        lease
    }

    fn claim(self: &Rc<Members>, leases: &Leases<Rc<Members>>, nonce: u64) -> Lease {
        let nonce = NonZeroU64::new(nonce).expect("not 0");
        block_on(self, leases.claim(nonce, 0)).expect("an id is free")
    }

    fn bind(self: &Rc<Members>, leases: &Leases<Rc<Members>>, lease: &Lease) {
        let stores: Vec<&Store> = self.stores.iter().collect();
        block_on(self, leases.bind_each(lease, &stores)).expect("nobody has fenced it");
    }

    /// The words of the entry of id 1 at a member: nonce, beat, epoch and reservation.
    fn entry(&self, member: usize) -> [u64; 4] {
        [0, 8, 16, 24].map(|offset| {
            let at = self.stores[member].table_at + offset;
            let Ok(word) = self.homes[member].host.memory().load(at, Width::W8);
            if offset < 16 { word as u64 } else { (word as u64).swap_bytes() }
        })
    }

    fn write(&self, member: usize, word: u64, value: u64) {
        let at = self.stores[member].table_at + word * 8;
        let bytes = if word < 2 { value.to_le_bytes() } else { value.to_be_bytes() };
        let Ok(()) = self.homes[member].host.memory().write(at, &bytes);
    }

    fn epochs(&self) -> Vec<u64> {
        (0..self.stores.len()).map(|member| self.entry(member)[2]).collect()
    }

    fn check(&self, node: NodeId) -> Result<(), FabricError> {
        match self.down.get() == Some(node.0) {
            true => Err(FabricError::Unreachable { node, reason: "the test says so".into() }),
            false => Ok(()),
        }
    }
}

impl Turns for Members {
    fn end_turn(&self) {
        self.endpoints.iter().for_each(Turns::end_turn);
    }

    fn wait(&self, core: &Idle<'_>) {
        self.endpoints[0].wait(core);
    }
}

impl Fabric for Members {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        self.check(node)?;
        self.endpoints[node.0 as usize].run(node, chain, reply).await
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        self.check(node)?;
        self.endpoints[node.0 as usize].call(node, service, request, answer).await
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.endpoints[node.0 as usize].retire(node, key, buffer);
    }

    fn capabilities(&self, _: NodeId) -> Capabilities {
        self.capabilities.get()
    }
}

impl Clock for Members {
    fn now(&self) -> Duration {
        self.now.get()
    }

    fn wall(&self) -> Duration {
        self.wall.get()
    }

    async fn sleep(&self, duration: Duration) {
        self.now.set(self.now.get() + duration);
    }
}

#[test]
fn an_operation_holds_the_epoch_after_the_next() {
    for capabilities in [Capabilities::SOFTWARE, Capabilities::CALLS] {
        let members = Members::start(1);
        members.capabilities.set(capabilities);
        let leases = members.leases();
        let lease = members.lease(&leases, 7);
        let epochs = block_on(&members, Epochs::open(&leases, &lease)).expect("the member answers");
        assert_eq!((epochs.current(), members.epochs()), (2, vec![2]));
        let advance = || block_on(&members, epochs.advance());
        let first = epochs.enter();
        assert_eq!((advance(), members.epochs()), (Ok(true), vec![3]), "it runs in the current generation");
        let second = epochs.enter();
        assert_eq!((advance(), members.epochs()), (Ok(false), vec![3]), "it runs in an earlier generation");
        drop(first);
        assert_eq!((advance(), members.epochs()), (Ok(true), vec![4]));
        assert_eq!(advance(), Ok(false));
        drop(second);
        assert_eq!((advance(), advance(), members.epochs()), (Ok(true), Ok(true), vec![6]));
        epochs.enter().keep();
        assert_eq!((advance(), advance(), members.epochs()), (Ok(true), Ok(false), vec![7]));
    }
}

#[test]
fn an_epoch_counts_once_all_members_have_it() {
    let members = Members::start(3);
    let leases = members.leases();
    let mut lease = members.lease(&leases, 7);
    let epochs = block_on(&members, Epochs::open(&leases, &lease)).expect("all members answer");
    assert_eq!(members.epochs(), [2, 2, 2]);
    members.down.set(Some(2));
    let failed = block_on(&members, epochs.advance());
    assert!(matches!(failed, Err(LeaseError::Fabric(_))), "{failed:?}");
    // The lease is renewed at a majority, which does not suffice for the epoch.
    let renewed = block_on(&members, leases.renew_and_advance(&mut lease, &epochs, Duration::from_millis(1)));
    assert_eq!((renewed, epochs.current(), members.epochs()), (Ok(()), 2, vec![3, 3, 2]));
    members.down.set(None);
    let renewed = block_on(&members, leases.renew_and_advance(&mut lease, &epochs, Duration::from_millis(1)));
    assert_eq!((renewed, epochs.current(), members.epochs()), (Ok(()), 3, vec![3, 3, 3]));
    assert_eq!((0..3).map(|member| members.entry(member)[0]).collect::<Vec<_>>(), [7, 7, 7]);
    assert_eq!(block_on(&members, leases.release(lease)), Ok(()));
    assert_eq!((0..3).map(|member| members.entry(member)[0]).collect::<Vec<_>>(), [0, 0, 0]);
}

#[test]
fn a_new_holder_begins_above_late_requests_of_the_former_one_at_every_member() {
    let members = Members::start(3);
    // The claim of a dead client is left at one member, and the epochs differ.
    members.write(2, 0, 99);
    members.write(1, 2, 40);
    let leases = members.leases();
    // The member with that claim answers later.
    members.down.set(Some(2));
    let lease = members.claim(&leases, 7);
    members.down.set(None);
    members.bind(&leases, &lease);
    assert_eq!(lease.id(), ClientId::new(1).expect("not 0"));
    let epochs = block_on(&members, Epochs::open(&leases, &lease)).expect("all members answer");
    assert_eq!((epochs.current(), members.epochs()), (42, vec![42, 42, 42]));
    assert_eq!((0..3).map(|member| members.entry(member)[0]).collect::<Vec<_>>(), [7, 7, 7]);
    // A client that holds the key can overwrite an epoch. The next holder refuses to begin at the maximum.
    members.write(0, 2, u64::MAX);
    let failed = block_on(&members, Epochs::open(&leases, &lease)).err();
    assert_eq!(failed, Some(LeaseError::Exhausted));
}

#[test]
fn a_reopened_id_begins_above_its_reservation_and_a_stamp_in_the_future_is_refused() {
    let members = Members::start(3);
    let stores: Vec<&Store> = members.stores.iter().collect();
    let leases = members.leases();
    let lease = members.lease(&leases, 7);
    let open = || block_on(&members, Stamps::open(&leases, &lease, &stores)).expect("all members answer");
    let stamps = open();
    let next = |stamps: &Stamps<Rc<Members>>| block_on(&members, stamps.next());
    let first = next(&stamps).expect("the clocks agree");
    assert!(next(&stamps).expect("the clocks agree") > first);
    // The clock goes back by an hour, which lets no stamp fall.
    members.wall.set(members.wall.get() - Duration::from_secs(3600));
    let last = next(&stamps).expect("stamps rise");
    assert!(last > first && stamps.jumps() == 1);
    // One member is down and has not seen the reservation, which a majority has.
    let reserved = members.entry(0)[3];
    assert!(last < reserved && reserved <= first + 110_000, "{last} {reserved}");
    let reopened = open();
    assert!(next(&reopened).expect("stamps rise") >= reserved, "a former holder may have given them");
    // The clock goes ahead by an hour.
    members.wall.set(members.wall.get() + Duration::from_secs(7200));
    let before: Vec<_> = (0..3).map(|member| members.entry(member)).collect();
    let error = next(&reopened).expect_err("it is far ahead");
    assert!(matches!(error, StampError::Ahead { node: NodeId(0), .. }), "{error:?}");
    assert!(error.to_string().contains("set both clocks, for example by NTP"), "{error}");
    assert_eq!((0..3).map(|member| members.entry(member)).collect::<Vec<_>>(), before, "nothing was changed");
    members.wall.set(members.wall.get() - Duration::from_secs(3600));
    next(&reopened).expect("the clock is right again");
}
