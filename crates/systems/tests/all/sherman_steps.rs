//! Sherman step by step: what another client does between two requests of an operation.

use crate::support::intercept::{Intercept, Then};
use crate::support::{Home, run};
use farside_fabrics::direct::Direct;
use farside_fabrics::layer::count::Count;
use farside_fabrics::local::LocalNode;
use farside_remote::clock::Clock;
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::wire::Code;
use farside_remote::{
    Addr, By, Capabilities, Chain, ChainBuf, Fabric, FabricError, Key, NodeId, Reply, Status, write,
};
use farside_systems::index::sherman::system::ShermanKind;
use farside_systems::index::sherman::{KIND, Sherman, Spec, Stat};
use farside_systems::index::{Index, IndexError};
use farside_systems::store::{self, Members};
use farside_systems::system::{Options, System};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

/// Length of a lease in microseconds that no client renews during a test: only operations send requests.
const LONG: u64 = 600_000_000;

type Endpoint = Rc<Intercept<'static, Rc<Count<Direct>>>>;

/// Length of a leaf of [`home`] in bytes.
const LEAF_LEN: usize = 352;

/// What others do between two lines of a READ: the number of bytes that are read before, and a function.
type Between = Rc<RefCell<Option<(usize, Box<dyn FnOnce()>)>>>;

/// What becomes of the chain by which a recoverer redoes a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Redo {
    Runs,
    /// It waits until this changes.
    Waits,
    /// It has come, and waits.
    IsHere,
}

/// A fabric whose chains let other tasks run first, that can tear the READ of a chain, and delay a recovery.
#[derive(Clone)]
struct Yields(Endpoint, Between, Rc<Cell<Redo>>);

impl Yields {
    /// Delays the chain that redoes a change, while it is to wait. The chain before it, which takes the lock, has a
    /// longer WRITE: that of a record.
    async fn delay(&self, chain: &Chain<'_>) {
        let lens: Vec<usize> = chain.view().ops().map(|op| op.payload().map(<[u8]>::len).sum()).collect();
        let codes: Vec<Code> = chain.view().ops().map(|op| op.code()).collect();
        if codes != [Code::Write, Code::Cas] || lens[0] != LEAF_LEN || self.2.get() == Redo::Runs {
            return;
        }
        self.2.set(Redo::IsHere);
        poll_fn(|cx| {
            cx.waker().wake_by_ref();
            if self.2.get() == Redo::Runs { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Reads the first bytes of a chain with one READ, lets others act, and reads the rest.
    async fn tear(
        &self,
        node: NodeId,
        chain: &Chain<'_>,
        reply: &mut Reply,
        (first, others): (usize, Box<dyn FnOnce()>),
    ) -> Result<(), FabricError> {
        self.0.run(node, chain, reply).await?;
        let mut bytes = reply.as_bytes().to_vec();
        others();
        self.0.run(node, chain, reply).await?;
        let cut = bytes.len() - reply.output(0).len() + first;
        bytes[cut..].copy_from_slice(&reply.as_bytes()[cut..]);
        reply.decode(1, &bytes).expect("two halves of one form");
        Ok(())
    }
}

impl Fabric for Yields {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        let mut has_yielded = false;
        poll_fn(|cx| {
            if std::mem::replace(&mut has_yielded, true) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
        self.delay(chain).await;
        let between = self.1.take();
        match between {
            Some(between) => self.tear(node, chain, reply, between).await,
            None => self.0.run(node, chain, reply).await,
        }
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        self.0.call(node, service, request, answer).await
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.0.retire(node, key, buffer);
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.0.capabilities(node)
    }
}

impl Clock for Yields {
    fn now(&self) -> Duration {
        self.0.now()
    }

    fn wall(&self) -> Duration {
        self.0.wall()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        self.0.sleep(duration)
    }
}

/// A client with its task, which runs while an operation runs.
struct Client {
    endpoint: Endpoint,
    between: Between,
    redo: Rc<Cell<Redo>>,
    index: Sherman<Yields>,
    keeper: Pin<Box<dyn Future<Output = ()>>>,
    /// Whether the task has ended.
    has_ended: bool,
}

impl Client {
    fn open(home: &Home, cache: usize) -> Client {
        static ENTROPY: AtomicU64 = AtomicU64::new(1 << 41);
        let (endpoint, between) = (Rc::new(Intercept::new(home.endpoint())), Between::default());
        let redo = Rc::new(Cell::new(Redo::Runs));
        let fabric = Yields(Rc::clone(&endpoint), Rc::clone(&between), Rc::clone(&redo));
        let entropy = ENTROPY.fetch_add(1, Ordering::Relaxed);
        let options = Options { entropy, node_cache: Some(cache), ..Options::NONE };
        let opening = async {
            let store = store::fetch_of(&endpoint, NodeId(0), "s", KIND).await.expect("the store exists");
            ShermanKind::open(fabric, &Members::one(NodeId(0), store), &options).await
        };
        let index = run(endpoint.inner(), opening).expect("it has that kind");
        let keeper = index.keeper();
        Client { endpoint, between, redo, index, keeper, has_ended: false }
    }

    /// Runs an operation until it has ended, or until a chain of it is stopped.
    fn run<O>(&mut self, operation: impl AsyncFnOnce(&mut Sherman<Yields>) -> O) -> Option<O> {
        let Client { endpoint, index, keeper, has_ended, .. } = self;
        let both = async {
            let mut operation = pin!(operation(index));
            poll_fn(|cx| {
                let mut polled = Poll::Pending;
                for _ in 0..2 {
                    *has_ended = *has_ended || keeper.as_mut().poll(cx).is_ready();
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

    fn stat(&mut self) -> Stat {
        self.run(async |index| index.stat().await).expect("no chain is stopped").expect("a walk")
    }

    fn counter(&self, name: &str) -> u64 {
        let counters = self.index.counters();
        counters.iter().find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no counter {name}")).1
    }

    /// Number of requests of a get.
    fn get_requests(&mut self, key: u64) -> Result<u64, IndexError> {
        self.endpoint.inner().take();
        let got = self.run(async |index| index.get(&key.to_be_bytes()).await.map(|found| found.is_some()));
        assert!(got.expect("no chain is stopped")?);
        Ok(self.endpoint.inner().take().requests)
    }
}

fn home(lease_us: u64) -> Home {
    home_of(Spec { lease_us, ..Spec::default() })
}

fn home_of(spec: Spec) -> Home {
    let home = Home::new(24);
    let spec = Spec { value_max: 40, span: 4, locks: 64, ids: 8, lanes: 4, ..spec };
    home.create_of(KIND, "s", 8, &serde_json::to_string(&spec).expect("plain data"));
    home
}

/// Calls `play` with the mutant on.
#[cfg(farside_mutants)]
fn with_mutant<T>(mutant: farside_remote::mutant::Mutant, play: impl FnOnce() -> T) -> T {
    farside_remote::mutant::Mutant::switch(Some(mutant));
    let played = play();
    farside_remote::mutant::Mutant::switch(None);
    played
}

/// Puts the last key of a full root leaf while another client puts a root above the same leaf.
fn root_race() -> Result<(), IndexError> {
    let home = home(LONG);
    let mut one = Client::open(&home, 0);
    let two = Rc::new(RefCell::new(Client::open(&home, 0)));
    for key in [10, 20, 30, 40] {
        one.put(key, b"v").expect("a put");
    }
    two.borrow_mut().get(10);
    let theirs = Rc::clone(&two);
    // Lock, read, write, two READs of the root's word, the new root; before its CAS.
    one.endpoint.before_chain(6, move || {
        // The lower half of the split leaf is split again, and gets a root.
        for key in [11, 12, 13] {
            theirs.borrow_mut().put(key, b"v").expect("a put");
        }
        assert_eq!(theirs.borrow().counter("root growths"), 1);
    });
    let put = one.put(50, b"v");
    assert_eq!((one.counter("root races lost"), one.counter("root growths")), (1, 0));
    let mut reader = Client::open(&home, 0);
    assert!([10, 11, 12, 13, 20, 30, 40, 50].iter().all(|key| reader.get(*key).is_some()));
    put.map(|()| assert_eq!(reader.stat().orphans, 0))
}

#[test]
fn a_client_that_loses_the_race_for_the_root_inserts_its_separator_there() {
    assert_eq!(root_race(), Ok(()));
    #[cfg(farside_mutants)]
    {
        let put = with_mutant(farside_systems::index::sherman::mutants::ROOT_GROWTH_LOST, root_race);
        assert!(put.is_err(), "the mutant lives");
    }
}

/// Requests of two gets of a key whose leaf was split since it was cached.
fn gets_after_split() -> Result<[u64; 2], IndexError> {
    let home = home(LONG);
    let mut writer = Client::open(&home, 0);
    for key in (0..100).step_by(10) {
        writer.put(key, b"v").expect("a put");
    }
    let mut reader = Client::open(&home, 1 << 20);
    assert!((0..100).step_by(10).all(|key| reader.get(key).is_some()));
    assert_eq!(reader.get_requests(90), Ok(1));
    // The last leaf has four keys, and the node above it three records.
    writer.put(81, b"v").expect("a put");
    assert_eq!((writer.counter("leaf splits"), writer.counter("inner splits")), (4, 0));
    Ok([reader.get_requests(90)?, reader.get_requests(90)?])
}

#[test]
fn a_cached_node_that_has_led_to_a_wrong_leaf_is_not_used_again() {
    let [first, second] = gets_after_split().expect("two gets");
    assert!(first > 1, "the leaf was split");
    assert_eq!(second, 1, "the node above it was read anew");
    #[cfg(farside_mutants)]
    {
        let gets =
            with_mutant(farside_systems::index::sherman::mutants::INVALID_ENTRY_USED, gets_after_split);
        assert!(gets.is_err(), "the mutant lives");
    }
}

/// Value of a get whose READ meets as many changes between two lines as a version of 8 bits counts. The old value is 40
/// times 1, and the new one 40 times 2.
fn wrapped_get() -> Vec<u8> {
    let home = home_of(Spec { version_bits: 8, lease_us: LONG, ..Spec::default() });
    let mut writer = Client::open(&home, 0);
    writer.put(1, &[1; 40]).expect("a put");
    let mut reader = Client::open(&home, 0);
    assert_eq!(reader.get(1), Some(vec![1; 40]));
    // Four lines with a tag of 2 bytes each have the head, and the first bytes of the value.
    let others = move || {
        for change in 1..=256 {
            writer.put(1, &[if change == 256 { 2 } else { 3 }; 40]).expect("a put");
        }
    };
    *reader.between.borrow_mut() = Some((4 * 16, Box::new(others)));
    reader.get(1).expect("the key is there")
}

#[test]
fn a_read_during_which_versions_have_wrapped_is_repeated() {
    assert_eq!(wrapped_get(), vec![2; 40]);
    #[cfg(farside_mutants)]
    {
        let torn = with_mutant(farside_systems::index::sherman::mutants::WRAPS_BELIEVED, wrapped_get);
        assert!(torn.starts_with(&[1]) && torn.ends_with(&[2]), "the mutant lives: {torn:?}");
    }
}

#[test]
fn a_client_that_dies_with_a_lock_is_fenced_and_its_change_redone_or_undone() {
    // The chain with the WRITE: its client dies before it, or after it has run.
    for (then, value) in [(Then::Stops, b"old"), (Then::Lost(Ran::Yes), b"new")] {
        let home = home(20_000);
        let mut dead = Client::open(&home, 0);
        dead.endpoint.stop_sleeps();
        dead.put(7, b"old").expect("a put");
        dead.endpoint.of_chain(2, then);
        let ended = dead.run(async |index| index.put(&7_u64.to_be_bytes(), b"new").await);
        assert!(!matches!(ended, Some(Ok(()))));
        let mut other = Client::open(&home, 0);
        assert_eq!(other.get(7), Some(value.to_vec()), "readers need no lock");
        other.put(7, b"next").expect("the lock is recovered");
        assert_eq!(other.get(7), Some(b"next".to_vec()));
        assert_eq!(other.index.recovered(), u64::from(value == b"old"));
    }
}

#[test]
fn a_split_of_a_dead_client_is_completed_and_its_memory_is_freed() {
    let home = home(20_000);
    let mut dead = Client::open(&home, 0);
    dead.endpoint.stop_sleeps();
    for key in [10, 20, 30, 40] {
        dead.put(key, b"v").expect("a put");
    }
    // Lock, read, write; the client dies before it reads the root's word.
    dead.endpoint.of_chain(3, Then::Stops);
    assert!(dead.run(async |index| index.put(&50_u64.to_be_bytes(), b"v").await).is_none());
    let mut other = Client::open(&home, 0);
    assert_eq!(other.stat().orphans, 1);
    assert!([10, 20, 30, 40, 50].iter().all(|key| other.get(*key).is_some()));
    other.run(async |index| index.heal().await).expect("no chain is stopped").expect("a heal");
    assert_eq!((other.index.recovered(), other.index.completed()), (1, 1));
    assert!(other.index.swept() > 0, "the units that the dead client had claimed");
    let stat = other.stat();
    assert_eq!((stat.orphans, stat.locked, stat.leaves, stat.inner), (0, 0, 2, 1));
    assert_eq!(stat.claimed, stat.nodes() + other.index.spare_units() as u64);
}

/// Runs the first WRITEs of a chain, as if its process died then.
fn run_first(home: &Home, chain: &Chain<'_>, count: usize) {
    let writes: Vec<(Addr, Vec<u8>)> = chain
        .view()
        .ops()
        .take(count)
        .inspect(|op| assert_eq!(op.code(), Code::Write))
        .map(|op| (op.target(), op.payload().flatten().copied().collect()))
        .collect();
    let mut buffer = ChainBuf::new();
    let mut first = buffer.begin(chain.view().key());
    writes.iter().for_each(|(at, bytes)| _ = first.also(write(*at, bytes)));
    let (session, mut reply) = (home.host.open_session().expect("a session"), Reply::new());
    let ran = farside_remote::run(home.host.memory(), By::itself(session), first.view(), &mut reply);
    assert_eq!((ran.is_ok(), reply.verdict()), (true, Status::Ok));
    home.host.close_session(session);
}

/// A client dies when the record of a split is complete. One recoverer has taken the lock, and is slow to redo the
/// split, while another client heals the store. Returns the number of units that are claimed, and the number that are
/// nodes or are kept by clients.
fn healed_before_redone() -> (u64, u64) {
    const LEASE: Duration = Duration::from_millis(200);
    let home = home(LEASE.as_micros() as u64);
    let mut dead = Client::open(&home, 0);
    dead.endpoint.stop_sleeps();
    for key in [10, 20, 30, 40] {
        dead.put(key, b"v").expect("a put");
    }
    let host = Home { host: Arc::clone(&home.host) };
    // The sibling and the record; the client dies before it writes the leaf, and frees the lock.
    dead.endpoint.instead_of_write(move |chain| run_first(&host, chain, 2));
    assert!(dead.run(async |index| index.put(&50_u64.to_be_bytes(), b"v").await).is_none());
    let (mut slow, mut healer) = (Client::open(&home, 0), Client::open(&home, 0));
    slow.redo.set(Redo::Waits);
    let Client { index, keeper, redo, .. } = &mut slow;
    let Client { endpoint, index: healing, keeper: healer_keeper, .. } = &mut healer;
    let endpoint = Rc::clone(endpoint);
    let both = async {
        let key = 10_u64.to_be_bytes();
        let mut put = pin!(index.put(&key, b"w"));
        let mut heal = pin!(healing.heal());
        let (mut is_put, mut is_healed, mut is_here) = (false, false, None);
        poll_fn(|cx| {
            assert!(keeper.as_mut().poll(cx).is_pending() && healer_keeper.as_mut().poll(cx).is_pending());
            is_put = is_put || put.as_mut().poll(cx).map(|put| put.expect("a put")).is_ready();
            assert!(!is_put || is_here.is_some(), "the change was not redone");
            if redo.get() == Redo::IsHere {
                is_here.get_or_insert(endpoint.now());
            }
            if is_here.is_some() && !is_healed {
                is_healed = heal.as_mut().poll(cx).map(|healed| healed.expect("a heal")).is_ready();
            }
            // Long enough for another client to heal the store, if it does not wait for the recovery.
            let is_over = is_here.is_some_and(|since| endpoint.now() > since + 8 * LEASE);
            if is_healed || is_over {
                redo.set(Redo::Runs);
            }
            if is_put && is_healed { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    };
    run(endpoint.inner(), both);
    assert_eq!((slow.index.recovered(), healer.index.recovered()), (0, 1), "the other one has freed the id");
    let mut reader = Client::open(&home, 0);
    assert_eq!(reader.get(10), Some(b"w".to_vec()));
    assert!([20, 30, 40, 50].iter().all(|key| reader.get(*key).is_some()));
    let stat = reader.stat();
    let kept: usize = [&slow, &healer, &reader].iter().map(|client| client.index.spare_units()).sum();
    (stat.claimed, stat.nodes() + kept as u64)
}

#[test]
fn memory_that_a_slow_recoverer_may_link_is_not_freed() {
    let (claimed, used) = healed_before_redone();
    assert_eq!(claimed, used);
    #[cfg(farside_mutants)]
    {
        let (claimed, used) =
            with_mutant(farside_systems::index::mutants::RECOVERY_UNGUARDED, healed_before_redone);
        assert_eq!(claimed + 1, used, "the mutant lives");
    }
}

#[test]
fn a_lock_is_handed_over_within_a_client_and_then_costs_no_wave() {
    let home = home(LONG);
    let mut client = Client::open(&home, 1 << 20);
    client.put(1, b"v").expect("a put");
    for (puts, requests) in [(1_u8, 3), (2, 5), (4, 9), (6, 14)] {
        client.endpoint.inner().take();
        let before = client.counter("locks handed over");
        let mut handles: Vec<_> = (0..puts).map(|_| client.index.another()).collect();
        let ran = client.run(async |_| {
            let key = 1_u64.to_be_bytes();
            let values: Vec<[u8; 1]> = (0..puts).map(|value| [value]).collect();
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
        assert!(ran.is_some());
        let handed_over = client.counter("locks handed over") - before;
        println!("{puts} puts: {handed_over} handovers");
        if puts <= 4 {
            assert_eq!(client.endpoint.inner().take().requests, requests);
            assert_eq!(handed_over, u64::from(puts) - 1);
        } else {
            // Four lanes: the later puts come when a lane is free.
            assert!(handed_over > 0 && client.endpoint.inner().take().requests <= 3 * u64::from(puts));
        }
        assert_eq!(client.get(1), Some(vec![puts - 1]), "the last one has come last");
    }
}
