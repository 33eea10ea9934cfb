//! Blocks under locks on nodes in this process, and clients whose requests are lost, delayed or cut, while other
//! clients act.
//!
//! Invariant: the test determines the order of all requests, so a failure is reproducible.

use super::Home;
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::{Turns, block_on};
use farside_fabrics::layer::count::Count;
use farside_fabrics::local::{self, LocalNode};
use farside_remote::clock::Clock;
use farside_remote::control::{Ask, Store};
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::wire::Code;
use farside_remote::{
    Addr, Capabilities, Chain, ChainBuf, Fabric, FabricError, Key, Mode, NodeId, Reply, cas, read, read_as,
    write,
};
use farside_systems::blocks::abd_lock::layout::Table;
use farside_systems::blocks::abd_lock::{AbdLock, KIND};
use farside_systems::blocks::tag::Tag;
use farside_systems::blocks::{Blocks, BlocksError};
use farside_systems::lease::LockWord;
use farside_systems::members::{self, New};
use farside_systems::store::Member;
use farside_systems::system::{Options, Sizing};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use zerocopy::FromBytes;
use zerocopy::little_endian::U64;

/// Length of a block in bytes.
pub(crate) const BLOCK: usize = 512;
/// Number of blocks.
pub(crate) const BLOCKS: u64 = 16;
const STORE: &str = "s";
/// Number of times that a test polls an operation which does not end.
const POLLS_MAX: u32 = 20_000;
/// Length of the leases of a store that has them.
const LEASE: Duration = Duration::from_millis(100);
/// Length of an outage: many times the silence of nodes that end a session soon.
const OUTAGE: Duration = Duration::from_secs(3);
/// Longer than a node keeps a silent session.
const LONG: Duration = Duration::from_secs(6);

/// What a chain does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Claims,
    Renews,
    Locks,
    Reads,
    Writes,
    Frees,
}

fn step_of(chain: &Chain<'_>) -> Step {
    let ops: Vec<_> = chain.view().ops().collect();
    if ops.iter().any(|op| op.code() == Code::Write) {
        return Step::Writes;
    }
    if ops.iter().any(|op| op.code() == Code::FetchAdd) {
        return Step::Renews;
    }
    let swaps: Vec<_> = ops.iter().filter(|op| op.code() == Code::Cas).collect();
    match &swaps[..] {
        [] => Step::Reads,
        [one] if one.operands()[..8] == [0; 8] => Step::Locks,
        [_] => Step::Frees,
        _ => Step::Claims,
    }
}

/// Fate of a chain.
pub(crate) enum Then {
    Runs,
    /// The chain waits until the test sets this flag, and runs then.
    Waits(Rc<Cell<bool>>),
    /// The chain never runs, and its future is never ready.
    Stops,
    /// The client dies in the middle of the chain's first WRITE.
    Cut,
    /// The client dies after this number of the chain's ops.
    CutAfter(usize),
    /// The reply is lost, and the error states whether the chain ran. The chain runs only for [`Ran::Yes`].
    Lost(Ran),
    /// The session is lost before the chain has run. The chain is a CAS, which the test may run later.
    Late,
}

type Before = Box<dyn FnMut(u32, Step) -> Then>;

/// A CAS that was sent: its node, key and word, and what it compares and swaps.
type Late = (u32, Key, Addr, [U64; 2]);

/// One client's sessions with the nodes.
pub(crate) struct Reach {
    homes: Vec<Arc<dyn LocalNode>>,
    endpoints: RefCell<Vec<Rc<Direct>>>,
    numbers: Vec<Cell<u64>>,
    /// Bindings of the client's sessions, by node. Each further session with the node gets them.
    bindings: RefCell<Vec<(u32, Vec<u8>)>>,
    /// Errors of the nodes that have refused to bind the client's next session.
    refused: RefCell<Vec<Option<FabricError>>>,
    before: RefCell<Before>,
    now: Cell<Duration>,
    /// Whether all requests that are posted together are answered together, later.
    is_paced: Cell<bool>,
    /// CASes that were sent over sessions which are lost, and may still run.
    late: RefCell<Vec<Late>>,
    /// Whether the fabric knows that no request of a session which is open may still run without a caller.
    has_settled: Cell<bool>,
}

impl Reach {
    fn new(homes: &[Home]) -> Rc<Reach> {
        let homes: Vec<Arc<dyn LocalNode>> = homes.iter().map(|home| Arc::clone(&home.host) as _).collect();
        let connect = |(id, home): (usize, &Arc<dyn LocalNode>)| {
            Rc::new(local::connect(home, NodeId(id as u32)).expect("a session"))
        };
        Rc::new(Reach {
            endpoints: RefCell::new(homes.iter().enumerate().map(connect).collect()),
            numbers: homes.iter().map(|_| Cell::new(1)).collect(),
            bindings: RefCell::default(),
            refused: RefCell::new(vec![None; homes.len()]),
            homes,
            before: RefCell::new(Box::new(|_, _| Then::Runs)),
            now: Cell::default(),
            is_paced: Cell::new(false),
            late: RefCell::default(),
            has_settled: Cell::new(false),
        })
    }

    fn endpoint(&self, node: NodeId) -> Rc<Direct> {
        Rc::clone(&self.endpoints.borrow()[node.0 as usize])
    }

    /// Replaces the session with a node by the next one, and binds it as the one before, as a pool of nodes does.
    pub(crate) fn reopen(&self, node: u32) {
        let next = local::connect(&self.homes[node as usize], NodeId(node)).expect("a session");
        for (_, request) in self.bindings.borrow().iter().filter(|(of, _)| *of == node) {
            let bound = block_on(&next, next.call(NodeId(node), ServiceId::NODE, request, &mut Vec::new()));
            if let Err(refused) = bound {
                self.refused.borrow_mut()[node as usize] = Some(refused);
            }
        }
        self.endpoints.borrow_mut()[node as usize] = Rc::new(next);
        let number = &self.numbers[node as usize];
        number.set(number.get() + 1);
    }

    /// Runs the requests of lost sessions that were late.
    fn run_late(&self) {
        for (node, key, at, [compare, swap]) in self.late.take() {
            let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
            let mut chain = buffer.begin(key);
            chain.also(cas(Mode::Eq, at, &compare, &swap));
            let endpoint = self.endpoint(NodeId(node));
            block_on(&*endpoint, endpoint.run(NodeId(node), &chain, &mut reply)).expect("it runs");
        }
    }

    /// Runs the first `whole` ops of a chain in their order and, if `half`, the first half of the next WRITE.
    async fn run_cut(&self, node: NodeId, chain: &Chain<'_>, whole: usize, half: bool) {
        let endpoint = self.endpoint(node);
        let view = chain.view();
        for (index, op) in view.ops().enumerate() {
            let is_cut = index >= whole && op.code() == Code::Write;
            if index >= whole && !half {
                return;
            }
            let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
            let mut one = buffer.begin(view.key());
            let bytes: Vec<u8> = op.payload().flatten().copied().collect();
            let operands: Vec<U64> = op
                .operands()
                .chunks_exact(8)
                .map(|word| U64::read_from_bytes(word).expect("8 bytes"))
                .collect();
            if op.code() == Code::Write {
                let len = if is_cut { bytes.len() / 2 } else { bytes.len() };
                one.also(write(op.target(), &bytes[..len]));
            } else {
                one.also(cas(Mode::Eq, op.target(), &operands[0], &operands[1]));
            }
            endpoint.run(node, &one, &mut reply).await.expect("it runs");
            if is_cut {
                return;
            }
        }
    }
}

impl Turns for Reach {
    fn end_turn(&self) {
        self.endpoints.borrow().iter().for_each(|endpoint| endpoint.end_turn());
    }
}

/// Waits for one further poll.
async fn next_poll() {
    let mut was_polled = false;
    poll_fn(|cx| {
        cx.waker().wake_by_ref();
        if std::mem::replace(&mut was_polled, true) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

impl Fabric for Reach {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        let mut before = self.before.replace(Box::new(|_, _| Then::Runs));
        let then = before(node.0, step_of(chain));
        *self.before.borrow_mut() = before;
        let lost = |ran| Err(FabricError::Lost { node, ran, reason: "the reply was lost".into() });
        match then {
            Then::Runs => {}
            Then::Waits(flag) => {
                // Nothing wakes the client's task when the flag is set.
                poll_fn(|cx| {
                    cx.waker().wake_by_ref();
                    if flag.get() { Poll::Ready(()) } else { Poll::Pending }
                })
                .await;
            }
            Then::Stops => return std::future::pending().await,
            Then::Cut | Then::CutAfter(_) => {
                let (whole, half) = if let Then::CutAfter(whole) = then { (whole, false) } else { (0, true) };
                self.run_cut(node, chain, whole, half).await;
                return std::future::pending().await;
            }
            Then::Lost(ran) => {
                if ran == Ran::Yes {
                    self.endpoint(node).run(node, chain, reply).await?;
                }
                return lost(ran);
            }
            Then::Late => {
                let view = chain.view();
                let op = view.ops().next().expect("a CAS");
                let word = |at| U64::read_from_bytes(&op.operands()[at..at + 8]).expect("8 bytes");
                self.late.borrow_mut().push((node.0, view.key(), op.target(), [word(0), word(8)]));
                return lost(Ran::Unknown);
            }
        }
        if self.is_paced.get() {
            next_poll().await;
        }
        if let Some(refused) = self.refused.borrow()[node.0 as usize].clone() {
            return Err(refused);
        }
        self.endpoint(node).run(node, chain, reply).await
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        {
            let endpoint = self.endpoint(node);
            let mut called = pin!(endpoint.call(node, service, request, answer));
            // Nothing wakes the client's task when the answer arrives.
            poll_fn(|cx| {
                cx.waker().wake_by_ref();
                called.as_mut().poll(cx)
            })
            .await?;
        }
        if matches!(serde_json::from_slice(request), Ok(Ask::Bind { .. })) {
            self.bindings.borrow_mut().push((node.0, request.to_vec()));
        }
        Ok(())
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.endpoint(node).retire(node, key, buffer);
    }

    /// Only the classic verbs.
    fn capabilities(&self, _node: NodeId) -> Capabilities {
        Capabilities::CALLS
    }

    fn session_number(&self, node: NodeId) -> u64 {
        self.numbers[node.0 as usize].get()
    }

    fn may_run_abandoned(&self, _node: NodeId) -> bool {
        !self.has_settled.get()
    }
}

impl Clock for Reach {
    fn now(&self) -> Duration {
        self.now.get()
    }

    fn wall(&self) -> Duration {
        self.now.get()
    }

    async fn sleep(&self, duration: Duration) {
        self.now.set(self.now.get() + duration);
        next_poll().await;
    }
}

pub(crate) type Counted = Rc<Count<Rc<Reach>>>;

/// A pool of nodes with one store.
pub(crate) struct Scene {
    pub(crate) homes: Vec<Home>,
    stores: Vec<Store>,
    /// Number of clients so far.
    clients: Cell<u64>,
}

impl Scene {
    pub(crate) fn new(replicas: usize) -> Scene {
        Scene::with(replicas, None)
    }

    /// A pool whose store has leases.
    pub(crate) fn with_leases(replicas: usize) -> Scene {
        Scene::with(replicas, Some(LEASE))
    }

    fn with(replicas: usize, lease: Option<Duration>) -> Scene {
        let homes: Vec<Home> = (0..replicas).map(|_| Home::new(8)).collect();
        let reach = Reach::new(&homes);
        let sizing = Sizing { items: Some(BLOCKS), value_len: BLOCK, lease, ..Sizing::default() };
        let (name, kind) = (STORE.to_owned(), KIND.to_owned());
        let new = New { name, kind, sizing, quota: 4 << 20, members: replicas };
        let created = block_on(&*reach, members::create(&*reach, replicas as u32, &new, [1, 2]));
        assert_eq!(created.expect("the nodes have memory").len(), replicas);
        let opened = block_on(&*reach, members::open(&*reach, replicas as u32, STORE)).expect("the store");
        let store = |member: &Member| member.store.clone().expect("the member answers");
        let stores = opened.list().iter().map(store).collect();
        Scene { homes, stores, clients: Cell::new(0) }
    }

    pub(crate) fn client(&self) -> Client {
        self.client_with(false)
    }

    pub(crate) fn client_with(&self, releases_apart: bool) -> Client {
        self.client_of(Options { releases_apart, ..Options::default() })
    }

    /// A client of nodes that end a silent session soon.
    fn hasty_client(&self) -> Client {
        self.client_of(Options { silence: Some(Duration::from_millis(60)), ..Options::default() })
    }

    fn client_of(&self, options: Options) -> Client {
        let reach = Reach::new(&self.homes);
        let opened = block_on(&*reach, members::open(&*reach, self.homes.len() as u32, STORE));
        self.clients.set(self.clients.get() + 1);
        let options = Options { entropy: 6 + self.clients.get(), ..options };
        let fabric = Rc::new(Count::new(Rc::clone(&reach)));
        let blocks =
            AbdLock::of(Rc::clone(&fabric), &opened.expect("the store"), &options).expect("the store");
        let keeper = Some(blocks.keeper());
        Client { reach, fabric, blocks, keeper: RefCell::new(keeper) }
    }

    /// Reads a block's lock word, its newest tag and its bytes at one replica, without the lock.
    pub(crate) fn look(&self, replica: usize, block: u64) -> (LockWord, Tag, Vec<u8>) {
        let store = &self.stores[replica];
        let table = Table::new(&store.parameters, store.extent()).expect("a table");
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(table.key);
        let lock = chain.also(read_as::<LockWord>(table.lock(block)));
        let copies: Vec<_> = (0..table.spec.copies())
            .map(|copy| {
                let tag = chain.also(read_as::<Tag>(table.content(block, copy)));
                (tag, chain.also(read(table.content(block, copy).plus(8), BLOCK as u32)))
            })
            .collect();
        let node = NodeId(replica as u32);
        let home: Arc<dyn LocalNode> = Arc::clone(&self.homes[replica].host) as _;
        let endpoint = local::connect(&home, node).expect("a session");
        block_on(&endpoint, endpoint.run(node, &chain, &mut reply)).expect("it runs");
        let copies = copies
            .into_iter()
            .map(|(tag, bytes)| (*reply.get(tag).expect("a tag"), reply.get(bytes).expect("bytes").to_vec()));
        let newest = copies.reduce(|one, other| if other.0 > one.0 { other } else { one });
        let (tag, bytes) = newest.expect("a copy");
        (*reply.get(lock).expect("a word"), tag, bytes)
    }

    /// Returns the replicas at which a block's lock is held.
    pub(crate) fn locked(&self, block: u64) -> Vec<usize> {
        (0..self.homes.len()).filter(|&replica| !self.look(replica, block).0.is_free()).collect()
    }

    /// Checks that no lock is held, and that all blocks are whole.
    pub(crate) fn audit(&self) {
        for block in 0..BLOCKS {
            assert_eq!(self.locked(block), [0; 0], "locks of block {block}");
            for replica in 0..self.homes.len() {
                let (_, _, bytes) = self.look(replica, block);
                assert!(bytes.iter().all(|&byte| byte == bytes[0]), "block {block} of replica {replica}");
            }
        }
    }
}

/// A client, and the means to determine the fate of its requests.
pub(crate) struct Client {
    pub(crate) reach: Rc<Reach>,
    pub(crate) fabric: Counted,
    pub(crate) blocks: AbdLock<Counted>,
    keeper: Keeper,
}

/// The client's task; `None` if it does not run.
type Keeper = RefCell<Option<Pin<Box<dyn Future<Output = ()>>>>>;

impl Client {
    /// Determines the fate of each chain from now on.
    pub(crate) fn before_each(&self, before: impl FnMut(u32, Step) -> Then + 'static) {
        *self.reach.before.borrow_mut() = Box::new(before);
    }

    /// From now on, requests reach only these replicas. Those to the others fail.
    pub(crate) fn reaches(&self, replicas: &'static [u32]) {
        self.before_each(
            move |node, _| if replicas.contains(&node) { Then::Runs } else { Then::Lost(Ran::No) },
        );
    }

    /// Lets requests that are sent together be answered together, and counts them from now on.
    pub(crate) fn pace(&self) {
        self.reach.is_paced.set(true);
        self.fabric.take();
    }

    /// Polls the client's task once.
    fn keep(&self) {
        keep(&self.reach, &self.keeper);
    }

    /// Runs the client's task for some time.
    pub(crate) fn idle(&self) {
        let until = self.reach.now() + LONG + LONG;
        for _ in 0..POLLS_MAX {
            self.keep();
            self.reach.now.set(self.reach.now() + LONG / 1000);
            if self.reach.now() > until {
                return;
            }
        }
    }

    pub(crate) fn write(&mut self, block: u64, fill: u8) -> Result<(), BlocksError> {
        let Client { reach, blocks, keeper, .. } = self;
        complete(reach, keeper, blocks.write(block, &[fill; BLOCK]))
    }

    /// Returns the byte that the whole block has.
    pub(crate) fn read(&mut self, block: u64) -> Result<u8, BlocksError> {
        let mut bytes = [0xee; BLOCK];
        let Client { reach, blocks, keeper, .. } = self;
        complete(reach, keeper, blocks.read(block, &mut bytes))?;
        assert!(bytes.iter().all(|&byte| byte == bytes[0]), "the bytes are of one write: {bytes:?}");
        Ok(bytes[0])
    }

    /// Reads a block from exactly these replicas.
    pub(crate) fn read_from(&mut self, block: u64, replicas: &'static [u32]) -> u8 {
        self.reaches(replicas);
        let read = self.read(block).expect("a majority answers");
        self.before_each(|_, _| Then::Runs);
        read
    }

    /// Begins a write, polls it and the client's task `polls` times, and drops it. Returns whether it has ended.
    pub(crate) fn drop_write(&mut self, block: u64, fill: u8, polls: u32) -> bool {
        let bytes = [fill; BLOCK];
        let Client { reach, blocks, keeper, .. } = self;
        drop_after(reach, keeper, blocks.write(block, &bytes), polls)
    }

    /// Begins a read, polls it and the client's task `polls` times, and drops it. Returns whether it has ended.
    pub(crate) fn drop_read(&mut self, block: u64, polls: u32) -> bool {
        let mut bytes = [0; BLOCK];
        let Client { reach, blocks, keeper, .. } = self;
        drop_after(reach, keeper, blocks.read(block, &mut bytes), polls)
    }

    /// Drops the client's task.
    pub(crate) fn stop_keeping(&self) {
        drop(self.keeper.take());
    }

    /// Ends the client's process: none of its requests runs any more.
    pub(crate) fn die(self) {
        drop(self.keeper.take());
    }
}

fn keep(reach: &Reach, keeper: &Keeper) {
    let mut has_ended = false;
    if let Some(keeper) = &mut *keeper.borrow_mut() {
        let polled = keeper.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        has_ended = polled.is_ready();
    }
    if has_ended {
        keeper.take();
    }
    reach.end_turn();
}

/// Polls an operation and the client's task in turns, until the operation waits for requests that were stopped.
fn begin<O>(reach: &Reach, keeper: &Keeper, mut operation: Pin<&mut impl Future<Output = O>>) {
    for _ in 0..10 {
        assert!(operation.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        keep(reach, keeper);
    }
}

/// Polls an operation and the client's task in turns, until the operation has ended.
fn complete<O>(reach: &Reach, keeper: &Keeper, operation: impl Future<Output = O>) -> O {
    let mut operation = pin!(operation);
    keep(reach, keeper);
    for _ in 0..POLLS_MAX {
        if let Poll::Ready(output) = operation.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            keep(reach, keeper);
            return output;
        }
        keep(reach, keeper);
    }
    panic!("the operation waits for ever")
}

fn drop_after(reach: &Reach, keeper: &Keeper, operation: impl Future, polls: u32) -> bool {
    let mut operation = pin!(operation);
    keep(reach, keeper);
    for _ in 0..polls {
        if operation.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready() {
            return true;
        }
        keep(reach, keeper);
    }
    false
}

/// All scenarios, by name. The correct code passes all of them.
pub(crate) const CASES: [(&str, fn()); 17] = [
    ("a_write_is_at_a_majority", a_write_is_at_a_majority),
    ("tags_are_read_under_the_locks", tags_are_read_under_the_locks),
    ("a_closed_client_frees_its_locks_after_an_outage", a_closed_client_frees_its_locks_after_an_outage),
    (
        "a_lock_is_freed_after_a_timeout_in_the_same_session",
        a_lock_is_freed_after_a_timeout_in_the_same_session,
    ),
    ("a_lock_that_is_granted_late_is_freed", a_lock_that_is_granted_late_is_freed),
    ("a_block_is_not_written_under_a_late_lock", a_block_is_not_written_under_a_late_lock),
    ("a_late_request_for_a_lock_is_freed", a_late_request_for_a_lock_is_freed),
    ("a_client_frees_only_its_own_locks", a_client_frees_only_its_own_locks),
    ("nobody_reads_the_half_of_a_write", nobody_reads_the_half_of_a_write),
    ("a_dropped_operation_frees_its_locks", a_dropped_operation_frees_its_locks),
    ("a_write_with_lost_answers_is_completed", a_write_with_lost_answers_is_completed),
    ("a_dead_writer_leaves_whole_blocks", a_dead_writer_leaves_whole_blocks),
    ("a_stopped_holder_is_fenced", a_stopped_holder_is_fenced),
    ("a_fence_counts_at_its_replica_alone", a_fence_counts_at_its_replica_alone),
    ("the_entry_is_that_of_the_owner", the_entry_is_that_of_the_owner),
    ("a_living_holder_keeps_its_locks", a_living_holder_keeps_its_locks),
    ("a_fenced_client_stays_fenced", a_fenced_client_stays_fenced),
];

/// Majorities of three replicas.
const MAJORITIES: [&[u32]; 3] = [&[1, 2], &[0, 1], &[0, 2]];

pub(crate) fn a_write_is_at_a_majority() {
    let scene = Scene::new(3);
    let mut client = scene.client();
    for majority in MAJORITIES {
        client.reaches(majority);
        assert_eq!(client.write(0, majority[0] as u8 + 1), Ok(()));
        for other in MAJORITIES {
            assert_eq!(client.read_from(0, other), majority[0] as u8 + 1, "{majority:?} and {other:?}");
        }
    }
    client.reaches(&[0]);
    for error in [client.write(0, 9).expect_err("one replica"), client.read(0).expect_err("one replica")] {
        let BlocksError::NoMajority { needed: 2, ran: Ran::No, .. } = error else { panic!("{error:?}") };
    }
    client.before_each(|_, _| Then::Runs);
    assert_eq!(client.read(0), Ok(1));
    scene.audit();
}

/// Another client writes the block just before this client asks for the locks.
pub(crate) fn tags_are_read_under_the_locks() {
    let scene = Scene::new(3);
    let (mut client, mut other) = (scene.client(), scene.client());
    assert_eq!(
        (client.write(1, 1), other.write(1, 2)),
        (Ok(()), Ok(())),
        "both have ids, the client the lower one"
    );
    let mut other = Some(other);
    client.before_each(move |node, step| {
        if let Some(mut other) = other.take_if(|_| step == Step::Locks) {
            assert_eq!(other.write(0, 2), Ok(()));
        }
        if node == 2 { Then::Lost(Ran::No) } else { Then::Runs }
    });
    assert_eq!(client.write(0, 1), Ok(()));
    for majority in MAJORITIES {
        assert_eq!(
            client.read_from(0, majority),
            1,
            "the last write has ended after the other: {majority:?}"
        );
    }
    scene.audit();
}

/// The program closes a client whose requests have failed. Its task frees the locks once the nodes can be reached
/// again.
pub(crate) fn a_closed_client_frees_its_locks_after_an_outage() {
    let scene = Scene::new(3);
    let (client, mut other) = (scene.hasty_client(), scene.client());
    let Client { reach, mut blocks, keeper, .. } = client;
    assert_eq!(complete(&reach, &keeper, blocks.write(0, &[1; BLOCK])), Ok(()));
    assert_eq!(other.write(1, 1), Ok(()), "the other client has an id");
    // All replicas grant the locks. Then none can be reached.
    let is_cut = Rc::new(Cell::new(false));
    let cut = Rc::clone(&is_cut);
    *reach.before.borrow_mut() = Box::new(move |_, step| {
        cut.set(cut.get() || step == Step::Writes);
        if cut.get() { Then::Lost(Ran::No) } else { Then::Runs }
    });
    assert!(complete(&reach, &keeper, blocks.write(0, &[2; BLOCK])).is_err());
    assert_eq!(scene.locked(0).len(), 3, "its locks are held");
    drop(blocks);
    let closed = reach.now();
    while reach.now() < closed + OUTAGE {
        keep(&reach, &keeper);
        reach.now.set(reach.now() + Duration::from_millis(1));
    }
    assert_eq!(scene.locked(0).len(), 3, "its locks are held all the while");
    *reach.before.borrow_mut() = Box::new(|_, _| Then::Runs);
    for _ in 0..1000 {
        keep(&reach, &keeper);
    }
    assert_eq!(scene.locked(0), [0; 0], "its locks are free");
    assert!(other.read(0).is_ok_and(|byte| byte == 1 || byte == 2));
    scene.audit();
}

/// A node stalls for less than its silence: the request for the lock times out, and is carried out later. No other
/// session is opened.
pub(crate) fn a_lock_is_freed_after_a_timeout_in_the_same_session() {
    let scene = Scene::new(3);
    let mut client = scene.client();
    assert_eq!(client.write(1, 1), Ok(()));
    client.before_each(|node, step| if (node, step) == (2, Step::Locks) { Then::Late } else { Then::Runs });
    assert_eq!(client.write(0, 1), Ok(()), "a majority suffices");
    client.before_each(|_, _| Then::Runs);
    client.idle();
    assert_eq!(client.blocks.replicas_with_debts(), 1, "the request may still be carried out");
    client.reach.run_late();
    assert_eq!(scene.locked(0), [2], "it is carried out");
    client.reach.has_settled.set(true);
    client.idle();
    assert_eq!(client.blocks.replicas_with_debts(), 0);
    scene.audit();
}

pub(crate) fn a_lock_that_is_granted_late_is_freed() {
    let scene = Scene::new(3);
    let mut client = scene.client();
    assert_eq!(client.write(1, 1), Ok(()));
    let is_delivered = Rc::new(Cell::new(false));
    let flag = Rc::clone(&is_delivered);
    client.before_each(move |node, step| match (node, step) {
        (2, Step::Locks) => Then::Waits(Rc::clone(&flag)),
        _ => Then::Runs,
    });
    assert_eq!(client.write(0, 1), Ok(()), "a majority suffices");
    assert_eq!(scene.locked(0), [0; 0]);
    is_delivered.set(true);
    client.idle();
    scene.audit();
    assert_eq!(scene.look(2, 0).1, Tag::NONE, "the operation was over");
}

/// Of a write, the first replica has it, the second one's write is delayed, and the third one's lock is delayed.
/// Another client writes at the first and the third. Then the third one's lock is granted.
pub(crate) fn a_block_is_not_written_under_a_late_lock() {
    let scene = Scene::new(3);
    let (mut client, mut other) = (scene.client(), scene.client());
    assert_eq!((client.write(1, 1), other.write(1, 2)), (Ok(()), Ok(())), "both have ids");
    let [locks, writes] = [(); 2].map(|()| Rc::new(Cell::new(false)));
    let flags = [Rc::clone(&locks), Rc::clone(&writes)];
    client.before_each(move |node, step| match (node, step) {
        (2, Step::Locks) => Then::Waits(Rc::clone(&flags[0])),
        (1, Step::Writes) => Then::Waits(Rc::clone(&flags[1])),
        _ => Then::Runs,
    });
    let bytes = [1; BLOCK];
    {
        let Client { reach, blocks, keeper, .. } = &mut client;
        let mut write = pin!(blocks.write(0, &bytes));
        let mut poll = || {
            let polled = write.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            keep(reach, keeper);
            polled.is_ready()
        };
        assert!(!(0..10).any(|_| poll()), "one replica has the block");
        assert_eq!(other.write(0, 2), Ok(()), "it holds the first and the third lock");
        locks.set(true);
        let mut has_ended = (0..10).any(|_| poll());
        writes.set(true);
        has_ended = has_ended || (0..10).any(|_| poll());
        assert!(has_ended);
    }
    client.idle();
    for majority in MAJORITIES {
        assert_eq!(other.read_from(0, majority), 2, "the other write came later: {majority:?}");
    }
    scene.audit();
}

/// A request for a lock is lost, and another client takes this lock before the first one settles its request.
pub(crate) fn a_client_frees_only_its_own_locks() {
    let scene = Scene::new(3);
    let (mut client, mut other) = (scene.client(), scene.client());
    assert_eq!((client.write(1, 1), other.write(1, 2)), (Ok(()), Ok(())), "both have ids");
    let mut is_first = true;
    client.before_each(move |node, step| match (node, step) {
        (0, Step::Locks) if std::mem::take(&mut is_first) => Then::Lost(Ran::Unknown),
        _ => Then::Runs,
    });
    assert_eq!(client.write(0, 1), Ok(()), "a majority suffices");
    assert_eq!(client.blocks.replicas_with_debts(), 1);
    let is_written = Rc::new(Cell::new(false));
    let flag = Rc::clone(&is_written);
    other.before_each(move |_, step| match step {
        Step::Writes => Then::Waits(Rc::clone(&flag)),
        _ => Then::Runs,
    });
    let bytes = [2; BLOCK];
    {
        let Client { reach, blocks, keeper, .. } = &mut other;
        let mut write = pin!(blocks.write(0, &bytes));
        begin(reach, keeper, write.as_mut());
        assert_eq!(scene.locked(0), [0, 1, 2]);
        client.reach.reopen(0);
        client.idle();
        assert_eq!(client.blocks.replicas_with_debts(), 0, "the request is settled");
        assert_eq!(scene.locked(0), [0, 1, 2], "the locks are the other client's");
        is_written.set(true);
        assert_eq!(complete(reach, keeper, write), Ok(()));
    }
    assert_eq!(client.read(0), Ok(2));
    scene.audit();
}

/// A request for a lock is late: it arrives after the client has opened the next session.
pub(crate) fn a_late_request_for_a_lock_is_freed() {
    let scene = Scene::new(3);
    let mut client = scene.client();
    assert_eq!(client.write(1, 1), Ok(()));
    let mut is_first = true;
    client.before_each(move |node, step| match (node, step) {
        (0, Step::Locks) if std::mem::take(&mut is_first) => Then::Late,
        _ => Then::Runs,
    });
    assert_eq!(client.write(0, 1), Ok(()), "a majority suffices");
    client.reach.reopen(0);
    for _ in 0..10 {
        client.keep();
    }
    client.reach.run_late();
    assert_eq!(scene.locked(0), [0], "the request has arrived");
    client.idle();
    scene.audit();
}

/// A client dies in the middle of its WRITEs, at a minority or a majority of the replicas.
pub(crate) fn nobody_reads_the_half_of_a_write() {
    for cut in [1, 2, 3] {
        let scene = Scene::new(3);
        let (mut client, mut other) = (scene.client(), scene.client());
        assert_eq!((client.write(0, 1), other.write(1, 2)), (Ok(()), Ok(())));
        client.before_each(move |node, step| match step {
            Step::Writes if node < cut => Then::Cut,
            Step::Writes => Then::Stops,
            _ => Then::Runs,
        });
        assert!(!client.drop_write(0, 2, 10));
        client.die();
        let error = other.read(0).expect_err("all locks are held");
        let BlocksError::Locked { block: 0, client: 1, .. } = error else { panic!("{error:?}") };
    }
}

/// The caller goes after any number of polls.
pub(crate) fn a_dropped_operation_frees_its_locks() {
    for releases_apart in [false, true] {
        let scene = Scene::new(3);
        let (mut client, mut other) = (scene.client_with(releases_apart), scene.client());
        assert_eq!(client.write(0, 1), Ok(()));
        client.pace();
        let (mut polls, mut has_ended) = (0, [false; 2]);
        while has_ended != [true; 2] {
            has_ended = [client.drop_write(0, 2 + polls as u8, polls), client.drop_read(0, polls)];
            client.idle();
            assert_eq!(scene.locked(0), [0; 0], "dropped after {polls} polls");
            let read = other.read(0).expect("the locks are free");
            assert!((1..=2 + polls as u8).contains(&read));
            polls += 1;
        }
        assert!(polls > 3, "the operations wait for several answers");
        scene.audit();
    }
}

/// The answers of all writes are lost, or the writes themselves.
pub(crate) fn a_write_with_lost_answers_is_completed() {
    for ran in [Ran::Yes, Ran::Unknown] {
        let scene = Scene::new(3);
        let (mut client, mut other) = (scene.client(), scene.client());
        assert_eq!((client.write(0, 1), other.write(1, 1)), (Ok(()), Ok(())));
        let mut left = 3;
        client.before_each(move |_, step| {
            if step != Step::Writes || left == 0 {
                return Then::Runs;
            }
            left -= 1;
            Then::Lost(ran)
        });
        let error = client.write(0, 2).expect_err("no answers");
        assert_eq!(error.ran(), Ran::Unknown, "{error}");
        for node in 0..3 {
            client.reach.reopen(node);
        }
        client.idle();
        assert_eq!(client.blocks.replicas_with_debts(), 0);
        scene.audit();
        assert_eq!((client.read(0), other.read(0)), (Ok(2), Ok(2)), "the write was completed");
    }
}

/// A client dies at each point of its WRITEs, at some of the replicas. Others take its locks, and read the old block or
/// the new one.
pub(crate) fn a_dead_writer_leaves_whole_blocks() {
    for (replicas, cut) in [(3, 1), (3, 2), (3, 3), (5, 3)] {
        for point in 0..4 {
            let scene = Scene::with_leases(replicas);
            let (mut client, mut other) = (scene.client(), scene.client());
            // Both copies of the block are in use.
            assert_eq!((client.write(0, 8), client.write(0, 1), other.write(1, 2)), (Ok(()), Ok(()), Ok(())));
            client.before_each(move |node, step| match (step, point) {
                (Step::Writes, _) if node >= cut => Then::Stops,
                (Step::Writes, 0) => Then::Cut,
                (Step::Writes, whole) => Then::CutAfter(whole),
                _ => Then::Runs,
            });
            assert!(!client.drop_write(0, 2, 10));
            client.die();
            let is_whole = |read| if point < 2 { read == 1 } else { [1, 2].contains(&read) };
            let read = other.read(0).expect("the lease expires");
            assert!(is_whole(read), "{read}, cut at {cut} replicas, point {point}");
            assert_eq!(other.read(0), Ok(read), "cut at {cut} replicas, point {point}");
            let mut third = scene.client();
            assert_eq!((third.read(0), third.write(0, 3), other.read(0)), (Ok(read), Ok(()), Ok(3)));
            // Of a lock that nobody needed, later operations take note, and then free it.
            for _ in 0..2 {
                third.idle();
                assert_eq!(third.write(0, 3), Ok(()));
            }
            other.idle();
            third.idle();
            let has = |replica: &usize| scene.look(*replica, 0).2 == [3; BLOCK];
            assert!((0..replicas).filter(has).count() > replicas / 2, "point {point}");
            scene.audit();
        }
    }
}

/// A client stops before its WRITEs, at all replicas, for longer than its lease. Then the WRITEs are carried out.
pub(crate) fn a_stopped_holder_is_fenced() {
    let scene = Scene::with_leases(3);
    let (mut client, mut other) = (scene.client(), scene.client());
    assert_eq!((client.write(1, 1), other.write(1, 2)), (Ok(()), Ok(())), "both have ids");
    let flag = Rc::new(Cell::new(false));
    stops_before_writes(&client, &flag);
    let bytes = [1; BLOCK];
    {
        let Client { reach, blocks, keeper, .. } = &mut client;
        let mut write = pin!(blocks.write(0, &bytes));
        begin(reach, keeper, write.as_mut());
        assert_eq!(scene.locked(0), [0, 1, 2]);
        assert_eq!(other.write(0, 2), Ok(()), "the client is fenced");
        flag.set(true);
        let error = complete(reach, keeper, write).expect_err("the client is fenced");
        assert_eq!(error.ran(), Ran::Unknown);
        assert!(error.to_string().contains("fenced"), "{error}");
    }
    client.idle();
    for majority in MAJORITIES {
        assert_eq!(other.read_from(0, majority), 2, "{majority:?}");
    }
    assert_eq!(client.blocks.replicas_with_debts(), 0, "a fenced client holds nothing");
    scene.audit();
}

/// A client was fenced at the first replica, and stops with its locks of another block at all replicas.
pub(crate) fn a_fence_counts_at_its_replica_alone() {
    let scene = Scene::with_leases(3);
    let (mut client, mut other) = (scene.client(), scene.client());
    assert_eq!((client.write(2, 1), other.write(2, 2)), (Ok(()), Ok(())), "both have ids");
    // The lock of block 1 is granted at the first replica, and the other requests for it are slow.
    client.before_each(|node, step| match (node, step) {
        (1 | 2, Step::Locks) => Then::Stops,
        _ => Then::Runs,
    });
    assert!(!client.drop_write(1, 1, 10));
    assert_eq!(scene.locked(1), [0]);
    let flag = Rc::new(Cell::new(false));
    stops_before_writes(&client, &flag);
    let bytes = [1; BLOCK];
    {
        let Client { reach, blocks, keeper, .. } = &mut client;
        let mut write = pin!(blocks.write(0, &bytes));
        begin(reach, keeper, write.as_mut());
        assert_eq!(scene.locked(0), [0, 1, 2]);
        other.reaches(&[0, 1]);
        assert_eq!(other.write(1, 2), Ok(()), "the client is fenced at the first replica");
        other.before_each(|_, _| Then::Runs);
        assert_eq!(other.write(0, 2), Ok(()), "the client is fenced at the others");
        flag.set(true);
        complete(reach, keeper, write).expect_err("the client is fenced");
    }
    for majority in MAJORITIES {
        assert_eq!(other.read_from(0, majority), 2, "{majority:?}");
    }
    scene.audit();
}

/// A claim of an id has failed, and has left its nonce at a replica. The next client gets the id, but not this replica.
/// It stops with its locks.
pub(crate) fn the_entry_is_that_of_the_owner() {
    for leaves_nonce in [false, true] {
        let scene = Scene::with_leases(3);
        let (mut failed, mut client, mut other) = (scene.client(), scene.client(), scene.client());
        if leaves_nonce {
            failed.reaches(&[2]);
            failed.write(3, 9).expect_err("one replica");
            failed.before_each(|_, _| Then::Runs);
        }
        client.before_each(|node, step| match (node, step) {
            (2, Step::Claims) => Then::Lost(Ran::No),
            _ => Then::Runs,
        });
        assert_eq!((client.write(1, 1), other.write(1, 2)), (Ok(()), Ok(())), "both have ids");
        let flag = Rc::new(Cell::new(false));
        stops_before_writes(&client, &flag);
        let bytes = [1; BLOCK];
        {
            let Client { reach, blocks, keeper, .. } = &mut client;
            let mut write = pin!(blocks.write(0, &bytes));
            begin(reach, keeper, write.as_mut());
            other.reaches(&[0, 2]);
            assert_eq!(other.write(0, 2), Ok(()), "the client is fenced");
            other.before_each(|_, _| Then::Runs);
            flag.set(true);
            complete(reach, keeper, write).expect_err("the client is fenced");
        }
        for majority in MAJORITIES {
            assert_eq!(other.read_from(0, majority), 2, "{majority:?}");
        }
        assert_eq!(failed.write(3, 9), Ok(()), "nobody has fenced another client");
    }
}

/// A client's WRITEs are slow, but it renews its lease.
pub(crate) fn a_living_holder_keeps_its_locks() {
    let scene = Scene::with_leases(3);
    let (mut client, mut other) = (scene.client(), scene.client());
    assert_eq!((client.write(1, 1), other.write(1, 2)), (Ok(()), Ok(())), "both have ids");
    let flag = Rc::new(Cell::new(false));
    stops_before_writes(&client, &flag);
    let (bytes, others) = ([1; BLOCK], [2; BLOCK]);
    {
        let mut write = pin!(client.blocks.write(0, &bytes));
        let mut next = pin!(other.blocks.write(0, &others));
        let mut cx = Context::from_waker(Waker::noop());
        let begun = other.reach.now();
        while other.reach.now() - begun < 20 * LEASE {
            assert!(write.as_mut().poll(&mut cx).is_pending());
            (0..4).for_each(|_| keep(&client.reach, &client.keeper));
            assert!(next.as_mut().poll(&mut cx).is_pending());
            keep(&other.reach, &other.keeper);
        }
        assert_eq!(scene.locked(0), [0, 1, 2]);
        flag.set(true);
        assert_eq!(complete(&client.reach, &client.keeper, write), Ok(()));
        assert_eq!(complete(&other.reach, &other.keeper, next), Ok(()));
    }
    assert_eq!(client.read(0), Ok(2));
    scene.audit();
}

/// A fenced client opens new sessions: they are bound to its nonce as well, and refused. Another client takes its
/// place.
pub(crate) fn a_fenced_client_stays_fenced() {
    let scene = Scene::with_leases(3);
    let (mut client, mut other) = (scene.client(), scene.client());
    assert_eq!((client.write(0, 1), other.write(1, 2)), (Ok(()), Ok(())), "both have ids");
    client.idle();
    client.before_each(|_, step| if step == Step::Reads { Then::Stops } else { Then::Runs });
    assert!(!client.drop_write(0, 2, 10));
    assert_eq!((scene.locked(0), other.read(0)), (vec![0, 1, 2], Ok(1)));
    client.before_each(|_, _| Then::Runs);
    for is_reopened in [false, true] {
        for node in (0..3).filter(|_| is_reopened) {
            client.reach.reopen(node);
        }
        let errors =
            [client.read(0).expect_err("it is fenced"), client.write(0, 3).expect_err("it is fenced")];
        for error in errors {
            assert_eq!(error.ran(), Ran::No);
            assert!(error.to_string().contains("fenced"), "{error}");
        }
    }
    let mut next = scene.client();
    assert_eq!((next.write(0, 4), other.read(0)), (Ok(()), Ok(4)));
    scene.audit();
}

/// Lets a client's WRITEs wait for this flag.
fn stops_before_writes(client: &Client, flag: &Rc<Cell<bool>>) {
    let flag = Rc::clone(flag);
    client.before_each(move |_, step| match step {
        Step::Writes => Then::Waits(Rc::clone(&flag)),
        _ => Then::Runs,
    });
}
