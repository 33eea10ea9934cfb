//! SMART step by step: what another client does between two requests of an operation.

use crate::support::intercept::{Intercept, Then};
use crate::support::{Home, run};
use farside_fabrics::direct::Direct;
use farside_fabrics::layer::count::Count;
use farside_remote::NodeId;
use farside_remote::fabric::Ran;
use farside_systems::index::smart::system::SmartKind;
use farside_systems::index::smart::{KIND, Smart, Spec};
use farside_systems::index::{Index, IndexError, Keys};
use farside_systems::store::{self, Members};
use farside_systems::system::{Options, System};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;

/// Length of a lease in microseconds that no client renews during a test: only operations send requests.
const LONG: u64 = 600_000_000;

type Endpoint = Rc<Intercept<'static, Rc<Count<Direct>>>>;

/// A client with its task, which runs while an operation runs.
struct Client {
    endpoint: Endpoint,
    index: Smart<Endpoint>,
    keeper: Pin<Box<dyn Future<Output = ()>>>,
}

impl Client {
    fn open(home: &Home, cache: usize) -> Client {
        static ENTROPY: AtomicU64 = AtomicU64::new(1 << 40);
        let endpoint = Rc::new(Intercept::new(home.endpoint()));
        let entropy = ENTROPY.fetch_add(1, Ordering::Relaxed);
        let options = Options { entropy, node_cache: Some(cache), ..Options::NONE };
        let opening = async {
            let store = store::fetch_of(&endpoint, NodeId(0), "s", KIND).await.expect("the store exists");
            SmartKind::open(Rc::clone(&endpoint), &Members::one(NodeId(0), store), &options).await
        };
        let index = run(endpoint.inner(), opening).expect("it has that kind");
        let keeper = index.keeper();
        Client { endpoint, index, keeper }
    }

    /// Runs an operation until it has ended, or until a chain of it is stopped.
    fn run<O>(&mut self, operation: impl AsyncFnOnce(&mut Smart<Endpoint>) -> O) -> Option<O> {
        let Client { endpoint, index, keeper } = self;
        let both = async {
            let mut operation = pin!(operation(index));
            poll_fn(|cx| {
                let mut polled = Poll::Pending;
                for _ in 0..2 {
                    let _goes_on = keeper.as_mut().poll(cx);
                    if polled.is_pending() {
                        polled = operation.as_mut().poll(cx).map(Some);
                    }
                }
                if polled.is_pending() && endpoint.is_stuck() { Poll::Ready(None) } else { polled }
            })
            .await
        };
        run(endpoint.inner(), both)
    }

    fn put(&mut self, key: u64, value: &[u8]) -> Result<(), IndexError> {
        self.run(async |index| index.put(&key.to_be_bytes(), value).await).expect("no chain is stopped")
    }

    fn get(&mut self, key: u64) -> Option<Vec<u8>> {
        let got = self
            .run(async |index| index.get(&key.to_be_bytes()).await.map(|found| found.map(<[u8]>::to_vec)));
        got.expect("no chain is stopped").expect("a get")
    }

    fn counter(&self, name: &str) -> u64 {
        let counters = self.index.counters();
        counters.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no counter {name}")).1
    }
}

fn home(lease_us: u64) -> Home {
    let home = Home::new(24);
    let spec = Spec {
        keys: Keys::Numbers,
        value_max: 40,
        chunk: 1 << 14,
        ids: 8,
        lanes: 2,
        lease_us,
        ..Spec::default()
    };
    home.create_of(KIND, "s", 8, &serde_json::to_string(&spec).expect("plain data"));
    home
}

/// Number of invalidations of a warm cache after a leaf split between the lock and the WRITE of an update.
fn update_during_split() -> u64 {
    let home = home(LONG);
    let mut one = Client::open(&home, 0);
    let two = Rc::new(RefCell::new(Client::open(&home, 0)));
    one.put(0x0101, b"a").expect("a put");
    one.put(0x0101, b"b").expect("an update");
    let theirs = Rc::clone(&two);
    // The root slot, the leaf, the lock.
    one.endpoint.before_chain(3, move || theirs.borrow_mut().put(0x0102, b"v").expect("a put"));
    one.put(0x0101, b"c").expect("an update");
    assert_eq!(two.borrow().counter("leaf splits"), 1);
    let mut reader = Client::open(&home, 1 << 20);
    for _ in 0..4 {
        assert_eq!(reader.get(0x0101), Some(b"c".to_vec()));
        assert_eq!(reader.get(0x0102), Some(b"v".to_vec()));
    }
    reader.counter("cache invalidations")
}

#[test]
fn an_update_does_not_roll_the_reverse_pointer_back() {
    assert_eq!(update_during_split(), 0);
    #[cfg(farside_mutants)]
    {
        use farside_remote::mutant::Mutant;
        Mutant::switch(Some(farside_systems::index::smart::mutants::REV_PTR_ROLLED_BACK));
        let invalidations = update_during_split();
        Mutant::switch(None);
        assert!(invalidations > 0, "the mutant lives");
    }
}

/// Number of chains of an insert with a type switch, if a path split changes the node's prefix before the switch.
fn switch_during_path_split() -> u64 {
    let home = home(LONG);
    let key = |byte: u64| 0x0001_0000_0001 | byte << 8;
    let mut one = Client::open(&home, 0);
    let two = Rc::new(RefCell::new(Client::open(&home, 0)));
    for byte in 1..=4 {
        one.put(key(byte), b"v").expect("a put");
    }
    two.borrow_mut().put(key(1), b"v").expect("a put");
    let theirs = Rc::clone(&two);
    // The root slot, the node, the leaf, the CAS of its slot.
    one.endpoint.before_chain(4, move || theirs.borrow_mut().put(9 << 48 | key(1), b"w").expect("a put"));
    one.endpoint.inner().take();
    one.put(key(5), b"v").expect("a put");
    let chains = one.endpoint.inner().take().requests;
    assert_eq!((one.counter("type switches from 4"), two.borrow().counter("path splits")), (1, 1));
    let mut reader = Client::open(&home, 0);
    assert!((1..=5).all(|byte| reader.get(key(byte)).is_some()));
    assert_eq!(reader.get(9 << 48 | key(1)), Some(b"w".to_vec()));
    chains
}

#[test]
fn a_type_switch_succeeds_although_a_path_split_has_changed_the_prefix() {
    assert_eq!(switch_during_path_split(), 5);
    #[cfg(farside_mutants)]
    {
        use farside_remote::mutant::Mutant;
        Mutant::switch(Some(farside_systems::index::smart::mutants::MASKED_CAS_FULL_WORD));
        let played = std::panic::catch_unwind(switch_during_path_split);
        Mutant::switch(None);
        assert!(!matches!(played, Ok(5)), "the mutant lives");
    }
}

#[test]
fn a_client_that_dies_with_a_lock_is_fenced_and_its_update_redone_or_undone() {
    // The chain with the WRITE: its client dies before it, or after it has run.
    for (then, value) in [(Then::Stops, b"old"), (Then::Lost(Ran::Yes), b"new")] {
        let home = home(20_000);
        let mut dead = Client::open(&home, 0);
        dead.endpoint.stop_sleeps();
        dead.put(7, b"old").expect("a put");
        dead.put(7, b"old").expect("an update");
        dead.endpoint.of_chain(3, then);
        let ended = dead.run(async |index| index.put(&7_u64.to_be_bytes(), b"new").await);
        assert!(!matches!(ended, Some(Ok(()))));
        let mut other = Client::open(&home, 0);
        assert_eq!(other.get(7), Some(value.to_vec()), "readers need no lock");
        other.put(7, b"next").expect("the lock is recovered");
        assert_eq!(other.get(7), Some(b"next".to_vec()));
        assert_eq!(other.index.recovered(), u64::from(value == b"old"));
    }
}

/// Lets a client die with a lock. A second one heals, and the node refuses the chain of its recovery behind this number
/// of others. Then a third one heals. Returns the result of the second one, and the number of locks that are held.
fn healed_with_a_refused_chain(chains: u32) -> (Result<(), IndexError>, u64) {
    let home = home(20_000);
    let mut dead = Client::open(&home, 0);
    dead.endpoint.stop_sleeps();
    dead.put(7, b"old").expect("a put");
    dead.put(7, b"old").expect("an update");
    dead.endpoint.of_chain(3, Then::Stops);
    assert!(dead.run(async |index| index.put(&7_u64.to_be_bytes(), b"new").await).is_none());
    let mut second = Client::open(&home, 0);
    let (endpoint, is_fenced) = (Rc::clone(&second.endpoint), Rc::new(Cell::new(false)));
    let noted = Rc::clone(&is_fenced);
    endpoint.before_each_call(move || noted.set(true));
    let mut left = chains;
    endpoint.refuse_if(move || {
        if !is_fenced.get() {
            return false;
        }
        let is_refused = left == 0;
        left = left.wrapping_sub(1);
        is_refused
    });
    let healed = second.run(async |index| index.heal().await).expect("no chain is stopped");
    drop(second);
    let mut third = Client::open(&home, 0);
    third.run(async |index| index.heal().await).expect("no chain is stopped").expect("all leases expire");
    let stat = third.run(async |index| index.stat().await).expect("no chain is stopped").expect("a stat");
    (healed, stat.locked)
}

#[test]
fn a_lock_is_recovered_although_the_first_recovery_was_refused() {
    let refused = (0..8).filter(|&chains| {
        let (healed, held) = healed_with_a_refused_chain(chains);
        assert_eq!(held, 0, "chain {chains}: {healed:?}");
        healed.is_err()
    });
    assert!(refused.count() >= 3, "the records, the locks and the lease are read");
}

#[test]
fn puts_of_one_key_share_a_request_and_the_last_value_wins() {
    let home = home(LONG);
    let mut client = Client::open(&home, 1 << 20);
    client.put(1, b"v").expect("a put");
    client.put(1, b"w").expect("a put");
    let requests = |client: &mut Client| {
        client.endpoint.inner().take();
        let mut handles: Vec<_> = (0..8_u64).map(|_| client.index.another()).collect();
        let puts = client.run(async |_| {
            let key = 1_u64.to_be_bytes();
            let values: Vec<[u8; 1]> = (0..8).map(|value| [value]).collect();
            let mut running: Vec<_> = handles
                .iter_mut()
                .zip(&values)
                .map(|(index, value)| Box::pin(index.put(&key, value)))
                .collect();
            let mut ended = vec![false; running.len()];
            poll_fn(|cx| {
                for (put, ended) in running.iter_mut().zip(&mut ended) {
                    *ended = *ended || put.as_mut().poll(cx).map(|put| put.expect("a put")).is_ready();
                }
                if ended.iter().all(|ended| *ended) { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
        });
        assert!(puts.is_some());
        client.endpoint.inner().take().requests
    };
    assert!(requests(&mut client) <= 6, "at most two batches");
    assert!(client.counter("writes combined") > 0);
    assert_eq!(client.get(1), Some(vec![7]), "the last one has joined last");
}

#[test]
fn a_split_that_comes_too_late_leaves_no_node_behind() {
    let home = home(LONG);
    let key = |first: u64, last: u64| first << 56 | last;
    let mut one = Client::open(&home, 0);
    let two = Rc::new(RefCell::new(Client::open(&home, 0)));
    one.put(key(1, 0), b"v").expect("a put");
    one.put(key(2, 0), b"v").expect("a put");
    let theirs = Rc::clone(&two);
    // The root slot, the node, the leaf, the new node and leaf.
    one.endpoint.before_chain(4, move || theirs.borrow_mut().put(key(1, 2), b"w").expect("a put"));
    one.put(key(1, 1), b"v").expect("a put");
    assert_eq!((one.counter("leaf splits"), two.borrow().counter("leaf splits")), (1, 1));
    assert_eq!(one.counter("slot failures"), 1);
    let stat = one.run(async |index| index.stat().await).expect("no chain is stopped").expect("a walk");
    assert_eq!((stat.nodes.iter().sum::<u64>(), stat.leaves, stat.taken), (2, 4, stat.linked()));
}
