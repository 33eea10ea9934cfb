//! PRISM-TX step by step, on two members: a client, or a recoverer, dies before each of its chains in turn, loses each
//! response in turn, or goes on after others have recovered and the id has another holder.

use crate::support::intercept::{Intercept, Then};
use crate::support::{Home, run as run_on};
use farside_fabrics::direct::Direct;
use farside_fabrics::layer::count::Count;
use farside_remote::clock::Clock;
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use farside_systems::members::{self, New};
use farside_systems::registry::{self, AnyTxn};
use farside_systems::system::{Options, Sizing};
use farside_systems::txn::prism_tx::{KIND, Stat};
use farside_systems::txn::{Transacting, Txn, TxnError};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant};

const NODES: u32 = 2;
const STORE: &str = "s";
const LEASE: Duration = Duration::from_millis(5);

/// A client's endpoints at all nodes, as one fabric.
struct Endpoints(Vec<Rc<Count<Direct>>>);

impl Fabric for Endpoints {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        self.0[node.0 as usize].run(NodeId(0), chain, reply).await
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        self.0[node.0 as usize].call(NodeId(0), service, request, answer).await
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.0[node.0 as usize].retire(NodeId(0), key, buffer);
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.0[node.0 as usize].capabilities(NodeId(0))
    }

    fn may_run_abandoned(&self, _node: NodeId) -> bool {
        false
    }
}

impl Clock for Endpoints {
    fn now(&self) -> Duration {
        self.0[0].now()
    }

    fn wall(&self) -> Duration {
        self.0[0].wall()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        self.0[0].sleep(duration)
    }
}

type Endpoint = Rc<Intercept<'static, Endpoints>>;

fn run<O>(endpoint: &Endpoint, future: impl Future<Output = O>) -> O {
    run_on(&endpoint.inner().0[0], future)
}

/// Two nodes with a store of one id, so that every client has the same entries.
struct Scene {
    homes: Vec<Home>,
    /// A key of each member.
    keys: Vec<[u8; 8]>,
    /// Another key of each member, without a value.
    others: Vec<[u8; 8]>,
}

/// Size of a store of small values.
fn sizing(ids: u16) -> Sizing {
    let transacting = Transacting { ids: Some(ids), lanes: Some(2), ..Transacting::NONE };
    Sizing { items: Some(20), value_len: 40, lease: Some(LEASE), transacting, ..Sizing::default() }
}

impl Scene {
    fn new() -> Scene {
        Scene::with_ids(1)
    }

    fn with_ids(ids: u16) -> Scene {
        Scene::of(sizing(ids))
    }

    fn of(sizing: Sizing) -> Scene {
        let homes = (0..NODES).map(|_| Home::new(16)).collect();
        let mut scene = Scene { homes, keys: Vec::new(), others: Vec::new() };
        let endpoint = scene.endpoint();
        let (name, kind, quota) = (STORE.into(), KIND.into(), 6 << 20);
        let new = New { name, kind, sizing, quota, members: NODES as usize };
        run(&endpoint, members::create(&endpoint, NODES, &new, [1, 2])).expect("the nodes have memory");
        let mut client = Client::open(&scene);
        let key = |member: usize, number: usize| {
            let of_member = |key: &[u8; 8]| client.txn.member_of(key) == member;
            (0_u64..).map(u64::to_be_bytes).filter(of_member).nth(number).expect("members share the keys")
        };
        [scene.keys, scene.others] = [0, 1].map(|of| (0..NODES as usize).map(|at| key(at, of)).collect());
        client.write(&scene.keys, b"old").expect("nobody else is there");
        client.close();
        scene
    }

    fn endpoint(&self) -> Endpoint {
        Rc::new(Intercept::new(Endpoints(self.homes.iter().map(Home::endpoint).collect())))
    }

    /// Opens a client for one use, and closes it.
    fn by_client<O>(&self, uses: impl FnOnce(&mut Client) -> O) -> O {
        let mut client = Client::open(self);
        let output = uses(&mut client);
        client.close();
        output
    }

    /// Recovers all dead clients. Returns `None` if a chain was stopped.
    fn heal(&self, endpoint: &Endpoint) -> Option<Result<(), String>> {
        self.heal_with(endpoint, |_| ())
    }

    /// Does the same, and calls `fences` before the last member fences the first dead client. The chains from then on
    /// are always the same ones. Before, the recoverer looks at leases as often as its pauses allow.
    fn heal_with(
        &self,
        endpoint: &Endpoint,
        fences: impl FnOnce(&Endpoint) + 'static,
    ) -> Option<Result<(), String>> {
        let healing = async {
            let members = members::open(endpoint, NODES, STORE).await.map_err(|error| error.to_string())?;
            let (mut left, mut fences, own) = (NODES, Some(fences), Rc::downgrade(endpoint));
            endpoint.before_each_call(move || {
                left = left.saturating_sub(1);
                if left == 0
                    && let (Some(fences), Some(own)) = (fences.take(), own.upgrade())
                {
                    fences(&own);
                }
            });
            let healed = registry::heal(Rc::clone(endpoint), &members, &Options::NONE).await;
            healed.map(drop).map_err(|error| error.to_string())
        };
        run(endpoint, async {
            let mut healing = pin!(healing);
            poll_fn(|cx| match healing.as_mut().poll(cx) {
                Poll::Pending if endpoint.is_stuck() => Poll::Ready(None),
                polled => polled.map(Some),
            })
            .await
        })
    }

    /// Heals the store, and returns the values of the keys. Nothing may be left of any transaction.
    fn settled(&self) -> Vec<Vec<u8>> {
        self.heal(&self.endpoint()).expect("no chain is stopped").expect("the nodes answer");
        let mut client = Client::open(self);
        let stat = client.stat();
        assert_eq!((stat.unsettled, stat.open), (0, 0), "{stat:?}");
        let values = client.read(&self.keys);
        client.write(&self.keys, b"last").expect("nothing is in the way");
        assert_eq!(client.read(&self.keys), vec![b"last".to_vec(); self.keys.len()]);
        client.close();
        values
    }
}

/// A client with its task.
struct Client {
    endpoint: Endpoint,
    txn: AnyTxn<Endpoint>,
    keeper: Pin<Box<dyn Future<Output = ()>>>,
}

impl Client {
    fn open(scene: &Scene) -> Client {
        static ENTROPY: AtomicU64 = AtomicU64::new(1 << 50);
        let endpoint = scene.endpoint();
        let options = Options { entropy: ENTROPY.fetch_add(1, Ordering::Relaxed), ..Options::NONE };
        let opened = run(&endpoint, AnyTxn::open_in(Rc::clone(&endpoint), NODES, STORE, &options));
        let txn = opened.expect("an id is free, or its holder is dead");
        let keeper = txn.keeper();
        Client { endpoint, txn, keeper }
    }

    /// Runs an operation until it has ended, or until another chain was stopped.
    fn run<O>(&mut self, operation: impl AsyncFnOnce(&mut AnyTxn<Endpoint>) -> O) -> Option<O> {
        let Client { endpoint, txn, keeper } = self;
        endpoint.forget_stop();
        let both = async {
            let mut operation = pin!(operation(txn));
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
        run(endpoint, both)
    }

    /// Reads the keys and writes a value to all of them. Returns `None` if a chain was stopped.
    fn try_write(&mut self, keys: &[[u8; 8]], value: &[u8]) -> Option<Result<(), TxnError>> {
        self.run(async |txn| {
            txn.begin();
            txn.fetch(&keys.iter().map(|key| &key[..]).collect::<Vec<_>>()).await?;
            keys.iter().try_for_each(|key| txn.put(key, value))?;
            txn.commit().await.map(drop)
        })
    }

    /// Writes a value to each key, without reading it; deletes the key if there is no value. Returns `None` if a chain
    /// was stopped.
    fn try_put(&mut self, writes: &[([u8; 8], Option<&[u8]>)]) -> Option<Result<(), TxnError>> {
        self.run(async |txn| {
            txn.begin();
            writes.iter().try_for_each(|(key, value)| match value {
                Some(value) => txn.put(key, value),
                None => txn.delete(key),
            })?;
            txn.commit().await.map(drop)
        })
    }

    /// Id of the client.
    fn id(&self) -> u16 {
        let AnyTxn::PrismTx(txn) = &self.txn else { panic!("a store of another kind") };
        txn.id()
    }

    /// Writes a value to all keys. Tries again while another transaction is in the way.
    fn write(&mut self, keys: &[[u8; 8]], value: &[u8]) -> Result<(), TxnError> {
        let began = Instant::now();
        loop {
            match self.try_write(keys, value).expect("no chain is stopped") {
                Err(TxnError::Conflict) if began.elapsed() < Duration::from_secs(10) => {}
                written => return written,
            }
        }
    }

    fn read(&mut self, keys: &[[u8; 8]]) -> Vec<Vec<u8>> {
        let read = self.run(async |txn| {
            txn.begin();
            let mut values = Vec::new();
            for key in keys {
                values.push(txn.get(key).await?.unwrap_or_default().to_vec());
            }
            txn.commit().await.map(|_| values)
        });
        read.expect("no chain is stopped").expect("nothing is in the way")
    }

    fn stat(&mut self) -> Stat {
        self.try_stat().expect("the nodes answer")
    }

    fn try_stat(&mut self) -> Result<Stat, TxnError> {
        let stat = self.run(async |txn| {
            let AnyTxn::PrismTx(txn) = txn else { panic!("a store of another kind") };
            txn.stat().await
        });
        stat.expect("no chain of it is stopped")
    }

    fn close(self) {
        let Client { endpoint, txn, keeper } = self;
        drop(txn);
        run(&endpoint, keeper);
    }
}

/// Number of chains of a transaction, with room for those that a failure adds.
const CHAINS: u32 = 12;

/// What happens to a chain of the victim.
const FATES: [fn() -> Then; 4] =
    [|| Then::Stops, || Then::Lost(Ran::Yes), || Then::Lost(Ran::Unknown), || Then::Lost(Ran::No)];

/// Lets each chain of a transaction have each fate. If `is_disturbed`, another client has committed between the reads
/// and the prepare, so that the transaction aborts.
fn every_chain_of_a_client(is_disturbed: bool) {
    for chain in 0..CHAINS {
        for fate in FATES {
            let scene = Scene::with_ids(2);
            let mut victim = Client::open(&scene);
            let other = Rc::new(RefCell::new(is_disturbed.then(|| Client::open(&scene))));
            let (theirs, keys) = (Rc::clone(&other), scene.keys.clone());
            let count = Cell::new(0);
            victim.endpoint.before_each(move || {
                let number = count.replace(count.get() + 1);
                if number == NODES
                    && let Some(mut other) = theirs.take()
                {
                    other.write(&keys[..1], b"other").expect("nothing is in the way");
                    other.close();
                }
                if number == chain { fate() } else { Then::Runs }
            });
            let written = victim.try_write(&scene.keys, b"new");
            // The victim dies, or is closed without the end of its task.
            drop(victim);
            let is_other = is_disturbed && other.take().is_none();
            let values = scene.settled();
            let first = if is_other { b"other".to_vec() } else { b"old".to_vec() };
            let old = [first, b"old".to_vec()];
            let (is_old, is_new) = (values == old, values == vec![b"new".to_vec(); 2]);
            let may_be = match &written {
                Some(Ok(())) => is_new,
                Some(Err(error)) if error.ran() == Ran::No => is_old,
                _ => is_old || is_new,
            };
            assert!(may_be, "chain {chain}: {written:?} leaves {values:?}");
        }
    }
}

/// Tests that also detect broken variants which trials expose too rarely.
#[cfg(farside_mutants)]
pub(crate) const CASES: [(&str, fn()); 8] = [
    ("single read", a_read_of_one_key_comes_after_what_its_client_has_committed),
    ("recoverer dies", a_recoverer_may_die_at_each_chain),
    ("recoverer late", a_recoverer_may_be_late_at_each_chain),
    ("smaller intent", a_recoverer_waits_for_a_smaller_intent_of_another_dead_client),
    ("client goes on", a_client_goes_on_after_it_has_lost_any_response),
    ("overwritten value", a_commit_is_completed_although_its_first_value_was_overwritten),
    ("unprepared key", a_recoverer_leaves_a_key_that_was_not_prepared),
    ("two lanes", a_recoverer_settles_the_smaller_of_two_transactions_first),
];

#[test]
fn a_client_may_die_or_lose_its_session_at_each_chain_of_a_commit() {
    every_chain_of_a_client(false);
}

#[test]
fn a_client_may_die_or_lose_its_session_at_each_chain_of_an_abort() {
    every_chain_of_a_client(true);
}

/// Lets a client write all keys and die before this chain. Chains of its task do not count. Returns what the client has
/// learned.
fn dies_at(scene: &Scene, chain: u32) -> Option<Result<(), TxnError>> {
    let mut victim = Client::open(scene);
    victim.endpoint.stop_sleeps();
    victim.endpoint.of_chain(chain, Then::Stops);
    victim.try_write(&scene.keys, b"new")
}

/// Lets a client die before each chain of a commit, and its first recoverer die before each of its chains from the
/// fence on.
#[test]
pub(crate) fn a_recoverer_may_die_at_each_chain() {
    for chain in NODES..NODES + 5 {
        for of_recoverer in 0.. {
            let scene = Scene::new();
            let written = dies_at(&scene, chain);
            let healed =
                scene.heal_with(&scene.endpoint(), move |first| first.of_chain(of_recoverer, Then::Stops));
            let values = scene.settled();
            assert!(
                values == vec![b"old".to_vec(); 2] || values == vec![b"new".to_vec(); 2],
                "chain {chain} of the client ({written:?}) and {of_recoverer} of the recoverer ({healed:?}) leave \
                 {values:?}"
            );
            if healed.is_some() {
                assert!(of_recoverer > 4, "it reads the log at each member, and closes the entries");
                break;
            }
        }
    }
}

/// Stops a recoverer before each of its chains from the fence on, until another one has recovered the client, and the
/// next holder of the id has committed, or has prepared.
#[test]
pub(crate) fn a_recoverer_may_be_late_at_each_chain() {
    for chain in NODES..NODES + 5 {
        for (of_recoverer, next_stops) in
            (0..).flat_map(|of| [None, Some(NODES + 2)].map(|stops| (of, stops)))
        {
            let scene = Rc::new(Scene::new());
            let _stopped = dies_at(&scene, chain);
            let next = Rc::new(RefCell::new(None));
            let (theirs, to) = (Rc::clone(&scene), Rc::clone(&next));
            let late_at = move |late: &Endpoint| {
                late.before_chain(of_recoverer, move || {
                    theirs.heal(&theirs.endpoint()).expect("no chain is stopped").expect("the nodes answer");
                    let mut client = Client::open(&theirs);
                    if let Some(chain) = next_stops {
                        client.endpoint.stop_sleeps();
                        client.endpoint.of_chain(chain, Then::Stops);
                    }
                    let written = client.try_write(&theirs.keys, b"next");
                    let open = client.stat().open;
                    *to.borrow_mut() = Some((client, written, open));
                })
            };
            let healed = scene.heal_with(&scene.endpoint(), late_at);
            let mut next = next.take();
            if let Some((client, _, open)) = next.as_mut().filter(|_| next_stops.is_some()) {
                // A client that is not fenced keeps its intents.
                let left = client.try_stat();
                assert!(left.as_ref().is_err() || left.is_ok_and(|left| left.open == *open));
            }
            let written = next.as_ref().map(|(_, written, _)| written.clone());
            let is_over = written.is_none();
            drop(next);
            let values = scene.settled();
            let is_one = |value: &[u8]| values.iter().all(|found| found == value);
            let may_be = match written {
                Some(Some(Ok(()))) => is_one(b"next"),
                Some(_) => is_one(b"next") || is_one(b"new") || is_one(b"old"),
                // The recoverer has fewer chains.
                None => is_one(b"new") || is_one(b"old"),
            };
            assert!(
                may_be,
                "chain {chain} of the client, {of_recoverer} of the recoverer ({healed:?}): {values:?}"
            );
            if is_over {
                break;
            }
        }
    }
}

/// Stops a client within its commit, after its first member has DECIDED, and then a client that has overwritten one of
/// its keys without reading it. The recoverer meets the larger timestamp first.
#[test]
pub(crate) fn a_recoverer_waits_for_a_smaller_intent_of_another_dead_client() {
    for chain in 2 * NODES..2 * NODES + 3 {
        for of_other in 1..4 {
            let scene = Scene::with_ids(2);
            let mut clients = [Client::open(&scene), Client::open(&scene)];
            clients.sort_by_key(Client::id);
            let [mut other, mut victim] = clients;
            [&other, &victim].iter().for_each(|client| client.endpoint.stop_sleeps());
            victim.endpoint.of_chain(chain, Then::Stops);
            let _stopped = victim.try_write(&scene.keys, b"new");
            other.endpoint.of_chain(of_other, Then::Stops);
            let _stopped = other.try_put(&[(scene.keys[1], Some(b"other"))]);
            drop((victim, other));
            let values = scene.settled();
            let is = |member: usize, value: &[u8]| values[member] == value;
            assert!(
                is(1, b"other") || (is(0, b"new") == is(1, b"new")),
                "chain {chain} of the client and {of_other} of the other leave {values:?}"
            );
        }
    }
}

/// T1 reads x and is about to write y, at another member. T2, with a greater timestamp, writes x. Then its client reads
/// y alone and finds the old value, so T1 comes before T2 if it commits. With commit-wait, it must not.
#[test]
pub(crate) fn a_read_of_one_key_comes_after_what_its_client_has_committed() {
    for clock_error in [None, Some(Duration::from_micros(100))] {
        let sizing = sizing(2);
        let transacting = Transacting { clock_error, ..sizing.transacting };
        let lease = Some(Duration::from_secs(5));
        let scene = Rc::new(Scene::of(Sizing { lease, transacting, ..sizing }));
        let (x, y) = (scene.keys[0], scene.keys[1]);
        let mut first = Client::open(&scene);
        // Its prepare at the member of y has the only WRITE. The one at the member of x has run before.
        let theirs = Rc::clone(&scene);
        first.endpoint.before_write(move || {
            theirs.by_client(|second| {
                second.write(&[x], b"new").expect("nothing is in the way");
                assert_eq!(second.read(&[y]), [b"old"]);
            });
        });
        let written = first.run(async |txn| {
            txn.begin();
            assert_eq!(txn.get(&x).await?, Some(&b"old"[..]));
            txn.put(&y, b"first")?;
            txn.commit().await.map(drop)
        });
        first.close();
        let is_strict = clock_error.is_some();
        assert_eq!(written, Some(if is_strict { Err(TxnError::Conflict) } else { Ok(()) }));
        let of_y = if is_strict { b"old".to_vec() } else { b"first".to_vec() };
        assert_eq!(scene.settled(), [b"new".to_vec(), of_y]);
    }
}

/// Lets a client lose the response of each chain of a transaction, and then write other keys with each of its entries.
#[test]
pub(crate) fn a_client_goes_on_after_it_has_lost_any_response() {
    for chain in 0..CHAINS {
        for fate in &FATES[1..] {
            let scene = Scene::with_ids(2);
            let mut client = Client::open(&scene);
            client.endpoint.of_chain(chain, fate());
            let written = client.try_write(&scene.keys, b"new").expect("no chain is stopped");
            let others: Vec<([u8; 8], Option<&[u8]>)> =
                scene.others.iter().map(|key| (*key, Some(&b"next"[..]))).collect();
            let next = [0, 1].map(|_| client.try_put(&others).expect("no chain is stopped"));
            client.close();
            let values = scene.settled();
            let is = |value: &[u8]| values == vec![value.to_vec(); 2];
            let may_be = match &written {
                Ok(()) => is(b"new"),
                Err(error) if error.ran() == Ran::No => is(b"old"),
                Err(_) => is(b"old") || is(b"new"),
            };
            assert!(may_be, "chain {chain}: {written:?}, {next:?} leave {values:?}");
        }
    }
}

/// A client dies within its commit, after the first member has installed its value. Another client then reads that
/// value and overwrites it, so that no slot has an item of the dead client's transaction.
#[test]
pub(crate) fn a_commit_is_completed_although_its_first_value_was_overwritten() {
    let scene = Scene::with_ids(2);
    // It reads at each member, reserves timestamps, and prepares and commits at each member.
    assert_eq!(dies_at(&scene, 3 * NODES), None);
    scene.by_client(|client| {
        assert_eq!(client.read(&scene.keys[..1]), [b"new"]);
        client.write(&scene.keys[..1], b"other").expect("nothing is in the way");
    });
    assert_eq!(scene.settled(), [b"other", &b"new"[..]]);
}

/// A client whose read was overwritten dies within its abort. It has raised PW at one member only.
#[test]
pub(crate) fn a_recoverer_leaves_a_key_that_was_not_prepared() {
    for chain in NODES..NODES + 3 {
        let scene = Scene::with_ids(2);
        let mut victim = Client::open(&scene);
        victim.endpoint.stop_sleeps();
        let keys: Vec<&[u8]> = scene.keys.iter().map(|key| &key[..]).collect();
        let read = victim.run(async |txn| {
            txn.begin();
            txn.fetch(&keys).await
        });
        assert_eq!(read, Some(Ok(())));
        scene.by_client(|client| client.write(&scene.keys[..1], b"other")).expect("nothing is in the way");
        victim.endpoint.of_chain(chain, Then::Stops);
        let written = victim.run(async |txn| {
            keys.iter().try_for_each(|key| txn.put(key, b"new"))?;
            txn.commit().await.map(drop)
        });
        drop(victim);
        assert_eq!(scene.settled(), [b"other", &b"old"[..]], "chain {chain}: {written:?}");
    }
}

/// A client dies within two commits that overwrite the same key without reading it.
#[test]
pub(crate) fn a_recoverer_settles_the_smaller_of_two_transactions_first() {
    let scene = Scene::new();
    let mut victim = Client::open(&scene);
    victim.endpoint.stop_sleeps();
    // The chains before a commit look up the slot and prepare. The first transaction also reserves timestamps.
    for (commit, value) in [(3, b"1"), (2, b"2")] {
        victim.endpoint.of_chain(commit, Then::Stops);
        assert_eq!(victim.try_put(&[(scene.keys[0], Some(value))]), None);
    }
    assert_eq!(victim.stat().open, 2);
    drop(victim);
    assert_eq!(scene.settled(), [b"old"; 2]);
}

/// Length of values of which a segment has few.
const LARGE: usize = 40_000;

/// Two members with memory for few large values.
struct Full {
    scene: Scene,
    /// Unused keys, by member.
    keys: [Vec<[u8; 8]>; 2],
    /// Keys with large values at the second member.
    large: Vec<[u8; 8]>,
}

impl Full {
    fn new() -> Full {
        let scene = Scene::of(Sizing { items: Some(400), value_len: LARGE, ..sizing(3) });
        let client = Client::open(&scene);
        let of_member = |member: usize| {
            let keys = (1000_u64..).map(u64::to_be_bytes);
            keys.filter(|key| client.txn.member_of(key) == member).take(300).collect()
        };
        let keys = [0, 1].map(of_member);
        client.close();
        Full { scene, keys, large: Vec::new() }
    }

    /// Gives an unused key of the second member a large value.
    fn fill(&mut self) -> Result<(), TxnError> {
        let key = self.keys[1].pop().expect("there are enough keys");
        let filled =
            self.scene.by_client(|client| client.try_put(&[(key, Some(&[7; LARGE]))])).expect("it runs");
        self.large.extend(filled.is_ok().then_some(key));
        filled
    }

    /// Deletes a large value of the second member. Returns `false` if no such value is left.
    #[must_use]
    fn free(&mut self) -> bool {
        let Some(key) = self.large.pop() else {
            return false;
        };
        let deleted = self.scene.by_client(|client| client.try_put(&[(key, None)])).expect("it runs");
        assert_eq!(deleted, Ok(()), "a full store can be emptied");
        true
    }

    /// Returns an unused key of each member, with slots.
    fn pair(&mut self) -> [[u8; 8]; 2] {
        let pair = [0, 1].map(|member| self.keys[member].pop().expect("there are enough keys"));
        let claimed = self.scene.by_client(|client| client.read(&pair));
        assert_eq!(claimed, vec![Vec::<u8>::new(); 2]);
        pair
    }
}

#[test]
fn a_full_member_refuses_a_transaction_of_two_members_before_it_is_decided() {
    let mut full = Full::new();
    while full.fill().is_ok() {}
    assert!(full.large.len() >= 10, "{} values", full.large.len());
    let pair = full.pair();
    let both = |full: &Full| {
        full.scene.by_client(|client| {
            let put = client.try_put(&[(pair[0], Some(b"new")), (pair[1], Some(&[8; LARGE]))]);
            (put.expect("it runs"), client.read(&pair))
        })
    };
    assert_eq!(both(&full), (Err(TxnError::OutOfMemory), vec![Vec::new(); 2]));
    assert_eq!(full.scene.by_client(|client| client.stat().unsettled), 0);
    assert!(full.free());
    assert_eq!(both(&full), (Ok(()), vec![b"new".to_vec(), vec![8; LARGE]]));
}

/// A transaction that has decided, and which nobody can finish because its second member is full.
struct Stranded {
    full: Rc<RefCell<Full>>,
    /// The transaction's keys, one of each member.
    pair: [[u8; 8]; 2],
    /// Why healing has failed.
    failed: String,
    /// Number of such transactions before it that the reserve was enough for.
    recovered: u64,
}

impl Stranded {
    /// Lets clients die within commits whose first member has DECIDED, each after another client has taken the last
    /// buffer of the second member, until recoverers have used up the reserve. Returns `None` if the large values are
    /// used up before: a deleted one whose buffer is not free in time is spent for nothing.
    fn new() -> Option<Stranded> {
        let full = Rc::new(RefCell::new(Full::new()));
        while full.borrow_mut().fill().is_ok() {}
        // The last chain of a commit is that of the second member.
        let pair = full.borrow_mut().pair();
        let last = full.borrow().scene.by_client(|client| {
            let count = Rc::new(Cell::new(0));
            let theirs = Rc::clone(&count);
            client.endpoint.before_each(move || {
                theirs.set(theirs.get() + 1);
                Then::Runs
            });
            assert_eq!(client.try_put(&pair.map(|key| (key, Some(&b"small"[..])))), Some(Ok(())));
            count.get() - 1
        });
        let mut recovered = 0;
        while full.borrow_mut().free() {
            let pair = full.borrow_mut().pair();
            let mut victim = Client::open(&full.borrow().scene);
            let (theirs, count) = (Rc::clone(&full), Cell::new(0));
            victim.endpoint.before_each(move || {
                let number = count.replace(count.get() + 1);
                if number != last {
                    return Then::Runs;
                }
                let _else_it_has_none = theirs.borrow_mut().fill();
                Then::Stops
            });
            let put = victim.try_put(&[(pair[0], Some(b"new")), (pair[1], Some(&[8; LARGE]))]);
            drop(victim);
            if matches!(put, Some(Err(_))) {
                continue; // The buffer was not free yet.
            }
            let healed = {
                let full = full.borrow();
                full.scene.heal(&full.scene.endpoint()).expect("no chain is stopped")
            };
            match healed {
                Ok(()) => recovered += 1,
                Err(failed) => return Some(Stranded { full, pair, failed, recovered }),
            }
        }
        None
    }
}

#[test]
fn what_is_decided_waits_until_memory_is_free() {
    let began = Instant::now();
    let Stranded { full, pair, failed, recovered } = loop {
        assert!(began.elapsed() < Duration::from_secs(60), "the large values are used up each time");
        if let Some(stranded) = Stranded::new().filter(|stranded| !stranded.full.borrow().large.is_empty()) {
            break stranded;
        }
    };
    assert!(failed.contains("out of memory"), "{failed}");
    assert!(recovered >= 10, "{recovered} were recovered from the reserve");
    assert!(full.borrow_mut().free());
    let full = full.borrow();
    while let Err(error) = full.scene.heal(&full.scene.endpoint()).expect("no chain is stopped") {
        assert!(began.elapsed() < Duration::from_secs(60), "{error}");
    }
    let values = full.scene.by_client(|client| client.read(&pair));
    assert_eq!(values, [b"new".to_vec(), vec![8; LARGE]]);
}
