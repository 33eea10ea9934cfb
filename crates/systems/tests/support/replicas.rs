//! Replicated blocks on nodes in this process, and clients that reach some of the replicas only, while another client
//! acts.
//!
//! Invariant: the test determines the order of all requests, so a failure is reproducible.

use super::Home;
use super::intercept::Then;
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::{Turns, block_on};
use farside_fabrics::local::{self, LocalNode};
use farside_remote::clock::Clock;
use farside_remote::control::{Answer, Ask, Store};
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::wire::Code;
use farside_remote::{
    Addr, Capabilities, Chain, ChainBuf, Fabric, FabricError, Key, NodeId, Reply, read_as, write,
};
use farside_systems::blocks::prism_rs::layout::{Register, Table};
use farside_systems::blocks::prism_rs::{KIND, PrismRs};
use farside_systems::blocks::{Blocks, BlocksError, Scrubbed, WriterIds};
use farside_systems::members::{self, New};
use farside_systems::system::Sizing;
use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use zerocopy::IntoBytes;

/// Length of a block in bytes.
pub(crate) const BLOCK: usize = 512;
/// Number of blocks.
pub(crate) const BLOCKS: u64 = 64;
pub(crate) const STORE: &str = "s";
pub(crate) const ALL: &[u32] = &[0, 1, 2, 3, 4];
const NOBODY: &[u32] = &[];

/// What a chain does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Reads,
    Claims,
    Installs,
}

fn step_of(chain: &Chain<'_>) -> Step {
    let has = |code| chain.view().ops().any(|op| op.code() == code);
    match (has(Code::Allocate), has(Code::Cas)) {
        (true, _) => Step::Installs,
        (false, true) => Step::Claims,
        _ => Step::Reads,
    }
}

type Before = Box<dyn FnMut(u32, Step) -> Then>;
type BeforeAsk = Box<dyn FnMut(u32, &Ask) -> Then>;
/// An answer, or the reason of a refusal, that replaces the node's.
type Instead = Box<dyn FnMut(u32, &Ask) -> Option<Result<Answer, String>>>;

/// One client's sessions with the nodes.
pub(crate) struct Reach {
    /// The session with each node, and its number.
    endpoints: RefCell<Vec<(u64, Rc<Direct>)>>,
    before: RefCell<Before>,
    before_ask: RefCell<BeforeAsk>,
    instead: RefCell<Instead>,
    /// Whether a chain or a request was stopped.
    pub(crate) is_stuck: Cell<bool>,
    now: Cell<Duration>,
}

impl Reach {
    pub(crate) fn new(homes: &[Home]) -> Rc<Reach> {
        let endpoints = homes.iter().enumerate().map(|(id, home)| (1, connect(home, id as u32)));
        Rc::new(Reach {
            endpoints: RefCell::new(endpoints.collect()),
            before: RefCell::new(Box::new(|_, _| Then::Runs)),
            before_ask: RefCell::new(Box::new(|_, _| Then::Runs)),
            instead: RefCell::new(Box::new(|_, _| None)),
            is_stuck: Cell::default(),
            now: Cell::default(),
        })
    }

    /// Opens another session with a node whose former session is over.
    pub(crate) fn reopen(&self, home: &Home, node: u32) {
        let (number, endpoint) = &mut self.endpoints.borrow_mut()[node as usize];
        (*number, *endpoint) = (*number + 1, connect(home, node));
    }

    /// Determines the fate of each request to a catalog from now on.
    pub(crate) fn before_each_ask(&self, before: impl FnMut(u32, &Ask) -> Then + 'static) {
        *self.before_ask.borrow_mut() = Box::new(before);
    }

    /// Answers requests to a catalog in the nodes' place from now on. These requests do not run.
    pub(crate) fn answers_instead(
        &self,
        instead: impl FnMut(u32, &Ask) -> Option<Result<Answer, String>> + 'static,
    ) {
        *self.instead.borrow_mut() = Box::new(instead);
    }

    /// Determines the fate of each chain from now on.
    pub(crate) fn before_each_chain(&self, before: impl FnMut(u32, Step) -> Then + 'static) {
        *self.before.borrow_mut() = Box::new(before);
    }

    fn endpoint(&self, node: NodeId) -> Rc<Direct> {
        Rc::clone(&self.endpoints.borrow()[node.0 as usize].1)
    }
}

fn connect(home: &Home, node: u32) -> Rc<Direct> {
    let host: Arc<dyn LocalNode> = Arc::clone(&home.host) as _;
    Rc::new(local::connect(&host, NodeId(node)).expect("a session"))
}

impl Turns for Reach {
    fn end_turn(&self) {
        self.endpoints.borrow().iter().for_each(|(_, endpoint)| endpoint.end_turn());
    }
}

impl Fabric for Reach {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        let mut before = self.before.replace(Box::new(|_, _| Then::Runs));
        let then = before(node.0, step_of(chain));
        *self.before.borrow_mut() = before;
        match then {
            Then::Runs => self.endpoint(node).run(node, chain, reply).await,
            Then::Stops => {
                self.is_stuck.set(true);
                std::future::pending().await
            }
            Then::Lost(ran) => {
                if ran == Ran::Yes {
                    self.endpoint(node).run(node, chain, reply).await?;
                }
                Err(FabricError::Lost { node, ran, reason: "the reply was lost".into() })
            }
        }
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        let Ok(ask) = serde_json::from_slice::<Ask>(request) else { panic!("a request to a catalog") };
        match (self.instead.borrow_mut())(node.0, &ask) {
            Some(Ok(instead)) => {
                *answer = serde_json::to_vec(&instead).expect("plain data");
                return Ok(());
            }
            Some(Err(refusal)) => return Err(FabricError::Refused(refusal)),
            None => {}
        }
        let mut before = self.before_ask.replace(Box::new(|_, _| Then::Runs));
        let then = before(node.0, &ask);
        *self.before_ask.borrow_mut() = before;
        match then {
            Then::Runs => self.endpoint(node).call(node, service, request, answer).await,
            Then::Stops => {
                self.is_stuck.set(true);
                std::future::pending().await
            }
            Then::Lost(ran) => {
                if ran == Ran::Yes {
                    self.endpoint(node).call(node, service, request, answer).await?;
                }
                Err(FabricError::Lost { node, ran, reason: "the answer was lost".into() })
            }
        }
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.endpoint(node).retire(node, key, buffer);
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.endpoint(node).capabilities(node)
    }

    fn session_number(&self, node: NodeId) -> u64 {
        self.endpoints.borrow()[node.0 as usize].0
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
    }
}

/// A different number for each client.
pub(crate) fn entropy() -> u64 {
    static CLIENTS: AtomicU64 = AtomicU64::new(7);
    CLIENTS.fetch_add(1 << 20, Ordering::Relaxed)
}

/// A pool of nodes with one store.
pub(crate) struct Scene {
    pub(crate) homes: Vec<Home>,
}

impl Scene {
    pub(crate) fn new(replicas: usize) -> Scene {
        Scene::sized(replicas, BLOCKS)
    }

    pub(crate) fn sized(replicas: usize, blocks: u64) -> Scene {
        Scene::with_spares(replicas, 0, blocks)
    }

    /// Creates a pool with more nodes than the store has replicas.
    pub(crate) fn with_spares(replicas: usize, spares: usize, blocks: u64) -> Scene {
        Scene::on((0..replicas + spares).map(|_| Home::new(8)).collect(), replicas, blocks)
    }

    /// Creates a store with `replicas` replicas on some of these nodes.
    pub(crate) fn on(homes: Vec<Home>, replicas: usize, blocks: u64) -> Scene {
        let reach = Reach::new(&homes);
        let sizing = Sizing { items: Some(blocks), value_len: BLOCK, ..Sizing::default() };
        let (name, kind) = (STORE.to_owned(), KIND.to_owned());
        let new = New { name, kind, sizing, quota: 4 << 20, members: replicas };
        let created = block_on(&*reach, members::create(&*reach, homes.len() as u32, &new, [1, 2]));
        assert_eq!(created.expect("the nodes have memory").len(), replicas);
        Scene { homes }
    }

    pub(crate) fn client(&self) -> Client {
        self.client_over(&Reach::new(&self.homes))
    }

    pub(crate) fn client_over(&self, reach: &Rc<Reach>) -> Client {
        let reach = Rc::clone(reach);
        let opened = block_on(&*reach, members::open(&*reach, self.homes.len() as u32, STORE));
        let members = opened.expect("the store");
        let blocks = PrismRs::of(Rc::clone(&reach), &members);
        let stores = members.list().iter().map(|member| member.store.clone().ok()).collect();
        Client { reach, blocks: blocks.expect("the store"), stores }
    }

    /// Checks at each replica that the registers reach all live buffers. No scan runs.
    pub(crate) fn audit(&self) {
        let mut client = self.client();
        let blocks = client.blocks.blocks();
        for (index, home) in self.homes.iter().enumerate() {
            let stat = home.settled(STORE);
            assert_eq!(stat.scans, 0, "the audit is of a store that no scan has cleaned");
            let reached = (0..blocks).filter(|&block| !client.register(index, block).at.is_null()).count();
            assert_eq!(stat.live_buffers, reached as u64, "live and reachable buffers of replica {index}");
        }
    }
}

/// A client, and the means to decide which replicas it reaches.
pub(crate) struct Client {
    pub(crate) reach: Rc<Reach>,
    pub(crate) blocks: PrismRs<Rc<Reach>>,
    stores: Vec<Option<Store>>,
}

impl Client {
    /// Determines the fate of each chain from now on.
    pub(crate) fn before_each(&self, before: impl FnMut(u32, Step) -> Then + 'static) {
        self.reach.before_each_chain(before);
    }

    /// From now on reads and claims reach only `reads`, and installs only `installs`.
    pub(crate) fn reaches(&self, reads: &'static [u32], installs: &'static [u32]) {
        self.before_each(move |node, step| {
            let reached = if step == Step::Installs { installs } else { reads };
            if reached.contains(&node) { Then::Runs } else { Then::Stops }
        });
    }

    pub(crate) fn put(&mut self, block: u64, fill: u8) -> Result<(), BlocksError> {
        at_once(&self.reach, self.blocks.write(block, &[fill; BLOCK]))
    }

    /// Puts a block at these replicas alone, which are a majority.
    pub(crate) fn put_at(
        &mut self,
        replicas: &'static [u32],
        block: u64,
        fill: u8,
    ) -> Result<(), BlocksError> {
        self.reaches(ALL, replicas);
        let put = self.put(block, fill);
        self.reaches(ALL, ALL);
        put
    }

    /// Another task of the same client.
    pub(crate) fn another(&self) -> Client {
        let (reach, stores) = (Rc::clone(&self.reach), self.stores.clone());
        Client { reach, blocks: self.blocks.another(), stores }
    }

    /// Begins a put, which waits for replicas that it does not reach, and drops it.
    pub(crate) fn drop_put(&mut self, block: u64, fill: u8) {
        let bytes = [fill; BLOCK];
        {
            let mut put = pin!(self.blocks.write(block, &bytes));
            let polled = put.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            assert!(matches!(polled, Poll::Pending), "the put waits");
        }
        self.reach.end_turn();
    }

    /// Returns the byte that the whole block has.
    pub(crate) fn get(&mut self, block: u64) -> Result<u8, BlocksError> {
        let mut bytes = [0xee; BLOCK];
        at_once(&self.reach, self.blocks.read(block, &mut bytes))?;
        assert!(bytes.iter().all(|&byte| byte == bytes[0]), "the bytes are of one write: {bytes:?}");
        Ok(bytes[0])
    }

    /// Reads a block from exactly these replicas. Does not write it back anywhere else.
    pub(crate) fn get_from(&mut self, block: u64, replicas: &'static [u32]) -> u8 {
        self.reaches(replicas, replicas);
        let got = self.get(block);
        self.reaches(ALL, ALL);
        got.expect("a majority answers")
    }

    /// Reads a block's register at one replica.
    pub(crate) fn register(&mut self, replica: usize, block: u64) -> Register {
        let store = self.stores[replica].as_ref().expect("the member has answered");
        let table = Table::new(&store.parameters, store.extent()).expect("a table");
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(table.key);
        let register = chain.also(read_as::<Register>(table.register(block)));
        let endpoint = self.reach.endpoint(NodeId(replica as u32));
        block_on(&*endpoint, endpoint.run(NodeId(replica as u32), &chain, &mut reply)).expect("it runs");
        *reply.get(register).expect("a register")
    }
}

impl Client {
    /// Overwrites the first bytes of a block in place at one replica, as no client does.
    pub(crate) fn damage(&mut self, replica: usize, block: u64) {
        let at = self.register(replica, block).at;
        let store = self.stores[replica].as_ref().expect("the member has answered");
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(store.extent().key);
        let bad = [0xbad_u64; 2];
        chain.also(write(at, bad.as_bytes()));
        let endpoint = self.reach.endpoint(NodeId(replica as u32));
        block_on(&*endpoint, endpoint.run(NodeId(replica as u32), &chain, &mut reply)).expect("it runs");
        endpoint.end_turn();
    }

    /// Overwrites a block's register at one replica, as no client does.
    pub(crate) fn overwrite(&mut self, replica: usize, block: u64, register: Register) {
        self.overwrite_at(replica, |table| table.register(block), register.as_bytes());
    }

    /// Overwrites the highest writer id at one replica. It is the first word of the table.
    pub(crate) fn overwrite_highest_id(&mut self, replica: usize, highest: u64) {
        let at = self.stores[replica].as_ref().expect("the member has answered").table_at;
        self.overwrite_at(replica, |_| Addr::new(at), &highest.to_be_bytes());
    }

    fn overwrite_at(&mut self, replica: usize, at: impl Fn(&Table) -> Addr, bytes: &[u8]) {
        let store = self.stores[replica].as_ref().expect("the member has answered");
        let table = Table::new(&store.parameters, store.extent()).expect("a table");
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(table.key);
        chain.also(write(at(&table), bytes));
        let endpoint = self.reach.endpoint(NodeId(replica as u32));
        block_on(&*endpoint, endpoint.run(NodeId(replica as u32), &chain, &mut reply)).expect("it runs");
        endpoint.end_turn();
    }

    pub(crate) fn writer_ids(&mut self) -> Result<Option<WriterIds>, BlocksError> {
        at_once(&self.reach, self.blocks.writer_ids())
    }

    pub(crate) fn scrub(&mut self, block: u64) -> Result<Scrubbed, BlocksError> {
        at_once(&self.reach, self.blocks.scrub(block))
    }
}

/// Returns the output of an operation, which never waits if a majority answers.
pub(crate) fn at_once<O>(reach: &Reach, operation: impl Future<Output = O>) -> O {
    let polled = pin!(operation).poll(&mut Context::from_waker(Waker::noop()));
    reach.end_turn();
    match polled {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("the operation waits for ever"),
    }
}

/// Majorities of three replicas.
const MAJORITIES: [&[u32]; 3] = [&[1, 2], &[0, 1], &[0, 2]];

/// Reads a block from each majority, several times. While nobody writes, all reads return the same.
fn read_from_all_majorities(scene: &Scene) -> u8 {
    let mut reader = scene.client();
    let first = reader.get_from(0, MAJORITIES[0]);
    for majority in MAJORITIES.iter().chain(&MAJORITIES) {
        assert_eq!(reader.get_from(0, majority), first, "read from {majority:?}");
    }
    first
}

/// All scenarios, by name. The correct code passes all of them.
pub(crate) const CASES: [(&str, fn()); 9] = [
    ("a_write_is_at_a_majority", a_write_is_at_a_majority),
    ("what_one_read_has_returned_the_next_returns_too", what_one_read_has_returned_the_next_returns_too),
    ("a_replica_that_did_not_answer_does_not_count", a_replica_that_did_not_answer_does_not_count),
    ("a_replica_with_a_newer_block_counts", a_replica_with_a_newer_block_counts),
    ("a_late_write_back_replaces_no_newer_block", a_late_write_back_replaces_no_newer_block),
    ("a_write_after_a_dropped_one_has_another_tag", a_write_after_a_dropped_one_has_another_tag),
    ("writes_of_two_clients_have_different_tags", writes_of_two_clients_have_different_tags),
    ("two_clients_never_claim_one_id", two_clients_never_claim_one_id),
    ("a_repeated_write_keeps_its_tag", a_repeated_write_keeps_its_tag),
];

/// New-old inversion: a write has reached one replica, and one of two reads in a row finds it.
pub(crate) fn what_one_read_has_returned_the_next_returns_too() {
    let scene = Scene::new(3);
    let (mut writer, mut reader) = (scene.client(), scene.client());
    assert_eq!(writer.put(0, 1), Ok(()));
    writer.reaches(ALL, &[0]);
    writer.drop_put(0, 2);
    assert_eq!(reader.get_from(0, &[1, 2]), 1, "the new block is at one replica alone");
    assert_eq!(reader.get_from(0, &[0, 1]), 2);
    assert_eq!(reader.get_from(0, &[1, 2]), 2, "the former read has written it back");
    scene.audit();
}

pub(crate) fn a_write_is_at_a_majority() {
    let scene = Scene::new(3);
    let mut client = scene.client();
    assert_eq!(client.put(0, 1), Ok(()));
    for majority in MAJORITIES {
        assert_eq!(client.get_from(0, majority), 1, "{majority:?}");
    }
    let scene = Scene::new(5);
    let mut client = scene.client();
    for majority in [&[0, 1, 2], &[2, 3, 4], &[0, 2, 4]] {
        client.reaches(majority, majority);
        assert_eq!(client.put(1, majority[1] as u8), Ok(()));
        for other in [&[0, 1, 4], &[1, 2, 3], &[0, 3, 4]] {
            assert_eq!(client.get_from(1, other), majority[1] as u8, "{other:?}");
        }
    }
    scene.audit();
}

pub(crate) fn a_replica_that_did_not_answer_does_not_count() {
    for ran in [Ran::No, Ran::Unknown] {
        let scene = Scene::new(3);
        let mut client = scene.client();
        assert_eq!(client.put(0, 1), Ok(()));
        client.before_each(move |node, step| match (node, step) {
            (0, Step::Installs) => Then::Lost(ran),
            _ => Then::Runs,
        });
        assert_eq!(client.put(0, 2), Ok(()));
        assert_eq!(scene.client().get_from(0, &[0, 2]), 2, "two replicas have it");
        assert_eq!(read_from_all_majorities(&scene), 2);
    }
}

/// Another client writes the block after this client has read the tags. So the other write's tag is higher.
pub(crate) fn a_replica_with_a_newer_block_counts() {
    let scene = Scene::new(3);
    let (mut client, mut other) = (scene.client(), scene.client());
    assert_eq!((client.put(1, 1), other.put(1, 2)), (Ok(()), Ok(())), "both have ids");
    let mut other = Some(other);
    client.before_each(move |_, step| {
        if let Some(mut other) = other.take_if(|_| step == Step::Installs) {
            assert_eq!((other.put(1, 3), other.put(0, 3)), (Ok(()), Ok(())));
        }
        Then::Runs
    });
    assert_eq!(client.put(0, 4), Ok(()), "the put took effect just before the other one");
    assert_eq!(read_from_all_majorities(&scene), 3);
    scene.audit();
}

pub(crate) fn a_late_write_back_replaces_no_newer_block() {
    let scene = Scene::new(3);
    let (mut writer, mut reader, mut other) = (scene.client(), scene.client(), scene.client());
    assert_eq!((writer.put(1, 1), other.put(1, 2)), (Ok(()), Ok(())), "both have ids");
    writer.reaches(ALL, &[0]);
    writer.drop_put(0, 1);
    other.reaches(ALL, &[1, 2]);
    let mut other = Some(other);
    reader.before_each(move |node, step| match (node, step) {
        (2, Step::Reads) | (1, Step::Installs) => Then::Stops,
        (2, Step::Installs) => {
            assert_eq!(other.take().expect("one write-back").put(0, 2), Ok(()));
            Then::Runs
        }
        _ => Then::Runs,
    });
    assert_eq!(reader.get(0), Ok(1), "it was read before the other put");
    assert_eq!(reader.get_from(0, &[0, 2]), 2, "a write that has completed is read");
    assert_eq!(read_from_all_majorities(&scene), 2);
    scene.audit();
}

pub(crate) fn a_write_after_a_dropped_one_has_another_tag() {
    let scene = Scene::new(3);
    let mut client = scene.client();
    client.reaches(ALL, &[2]);
    client.drop_put(0, 1);
    client.reaches(&[0, 1], &[0, 1]);
    assert_eq!(client.put(0, 2), Ok(()));
    assert_eq!(read_from_all_majorities(&scene), 2, "the newer write of the client wins");
    scene.audit();
}

pub(crate) fn writes_of_two_clients_have_different_tags() {
    let scene = Scene::new(3);
    let (mut client, mut other) = (scene.client(), scene.client());
    client.reaches(ALL, &[2]);
    client.drop_put(0, 1);
    other.reaches(&[0, 1], &[0, 1]);
    assert_eq!(other.put(0, 2), Ok(()));
    read_from_all_majorities(&scene);
    let (a, b) = (other.register(0, 0), other.register(2, 0));
    assert!(a.tag == b.tag, "the reads have written the newest back");
    scene.audit();
}

/// Another client claims the id between this client's look at the ids and its claim.
pub(crate) fn two_clients_never_claim_one_id() {
    let scene = Scene::new(3);
    let (mut client, other) = (scene.client(), scene.client());
    other.reaches(ALL, &[2]);
    let mut other = Some(other);
    client.before_each(move |node, step| {
        if let Some(mut other) = other.take_if(|_| step == Step::Claims) {
            other.drop_put(0, 1);
        }
        if node == 2 && step != Step::Claims { Then::Stops } else { Then::Runs }
    });
    assert_eq!(client.put(0, 2), Ok(()));
    read_from_all_majorities(&scene);
    scene.audit();
}

/// Another client claims the id at one replica between this client's look at the ids and its claim. A second replica
/// accepts the claim, and the third does not answer.
pub(crate) fn a_refused_claim_waits_for_no_dead_replica() {
    let scene = Scene::new(3);
    let (mut client, other) = (scene.client(), scene.client());
    other.before_each(|node, step| match (node, step) {
        (0, _) | (_, Step::Reads) => Then::Runs,
        _ => Then::Stops,
    });
    let mut other = Some(other);
    client.before_each(move |node, step| {
        if let Some(mut other) = other.take_if(|_| step == Step::Claims) {
            other.drop_put(0, 1);
        }
        if node == 2 { Then::Stops } else { Then::Runs }
    });
    assert_eq!(client.put(0, 2), Ok(()), "the client claims the next id");
    assert_eq!(client.get_from(0, &[0, 1]), 2);
    scene.audit();
}

/// The answers of all installs are lost once, so they run twice.
pub(crate) fn a_repeated_write_keeps_its_tag() {
    let scene = Scene::new(3);
    let mut client = scene.client();
    assert_eq!(client.put(0, 1), Ok(()));
    let mut lost = 0;
    client.before_each(move |_, step| {
        lost += u32::from(step == Step::Installs);
        if step == Step::Installs && lost <= 3 { Then::Lost(Ran::Yes) } else { Then::Runs }
    });
    let before = client.register(0, 0).tag.counter();
    assert_eq!(client.put(0, 2), Ok(()));
    assert_eq!(client.register(0, 0).tag.counter(), before + 1);
    assert_eq!(read_from_all_majorities(&scene), 2);
    scene.audit();
}

/// A client that reaches no majority waits; one whose requests fail returns an error in bounded time.
pub(crate) fn without_a_majority_nothing_is_claimed() {
    let scene = Scene::new(3);
    let mut client = scene.client();
    assert_eq!(client.put(0, 1), Ok(()));
    client.before_each(|node, _| if node == 0 { Then::Runs } else { Then::Lost(Ran::No) });
    let before = client.reach.now();
    for error in [client.get(0).expect_err("no majority"), client.put(0, 2).expect_err("no majority")] {
        let is_expected =
            matches!(error, BlocksError::NoMajority { answered: 1, needed: 2, ran: Ran::No, .. });
        assert!(is_expected, "{error:?}");
    }
    client.before_each(|node, step| match (node, step) {
        (0, _) | (_, Step::Reads) => Then::Runs,
        _ => Then::Lost(Ran::No),
    });
    let error = client.put(0, 3).expect_err("no majority");
    assert_eq!(error.ran(), Ran::Unknown, "{error}");
    // Each of the two failing replicas took its share of the virtual time.
    assert!(client.reach.now() - before < Duration::from_secs(7), "{:?}", client.reach.now() - before);
    client.reaches(NOBODY, NOBODY);
    client.drop_put(0, 4);
    client.reaches(ALL, ALL);
    assert_eq!(client.get_from(0, &[0, 1]), 3, "one replica has it");
    assert_eq!(read_from_all_majorities(&scene), 3, "and the read has written it back");
    scene.audit();
}
