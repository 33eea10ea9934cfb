//! Three nodes in this process, and clients whose requests to them can fail, get another answer, or wait while another
//! client acts.
//!
//! Invariant: the test determines the order of all requests, so a failure is reproducible.

use super::Home;
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::{Turns, block_on};
use farside_fabrics::local::{self, LocalNode};
use farside_remote::clock::Clock;
use farside_remote::control::{Answer, Ask, Attempt, Decision, MemberState, Membership, Store};
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use farside_systems::kv::{AnyKv, Kv, KvError};
use farside_systems::members::{self, New};
use farside_systems::store::{Members, StoreError};
use farside_systems::system::{Options, Sizing};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Number of nodes.
const NODES: u32 = 3;
/// Name of the store.
const STORE: &str = "s";

/// Fate of a request.
enum Then {
    Runs,
    /// The request is not sent, since there is no session with the node.
    Unreachable,
    /// The node refuses the request.
    Refused,
    /// The request is carried out, and its answer is lost.
    Unanswered,
    /// The request is carried out, and this function changes its answer.
    Answers(fn(&mut Answer)),
}

type Before = Box<dyn FnMut(NodeId, &Ask) -> Then>;

/// One client's sessions with the nodes.
struct Several {
    endpoints: Vec<Direct>,
    before: RefCell<Before>,
    now: Cell<Duration>,
}

impl Several {
    /// Connects to the nodes. The node with number `n` is the node `order[n]` of `homes`.
    fn new(homes: &[Home], order: &[usize]) -> Rc<Several> {
        let connect = |(id, node): (usize, &usize)| {
            let node: Arc<dyn LocalNode> = Arc::clone(&homes[*node].host) as _;
            local::connect(&node, NodeId(id as u32)).expect("a session")
        };
        let endpoints = order.iter().enumerate().map(connect).collect();
        Rc::new(Several {
            endpoints,
            before: RefCell::new(Box::new(|_, _| Then::Runs)),
            now: Cell::new(Duration::ZERO),
        })
    }

    /// Calls `before` before each request to a node's catalog from now on, to determine the request's fate.
    fn before_each(&self, before: impl FnMut(NodeId, &Ask) -> Then + 'static) {
        *self.before.borrow_mut() = Box::new(before);
    }

    fn endpoint(&self, node: NodeId) -> &Direct {
        &self.endpoints[node.0 as usize]
    }

    fn create(
        self: &Rc<Several>,
        members: usize,
        attempt: Attempt,
    ) -> Result<Vec<(NodeId, Store)>, StoreError> {
        let sizing = Sizing { items: Some(100), ..Sizing::default() };
        let new = New { name: STORE.into(), kind: "prism-kv".into(), sizing, quota: 9 << 20, members };
        block_on(self, members::create(self, self.endpoints.len() as u32, &new, attempt))
    }

    fn open(self: &Rc<Several>) -> Result<Members, StoreError> {
        block_on(self, members::open(self, self.endpoints.len() as u32, STORE))
    }

    fn drop_store(self: &Rc<Several>) {
        let dropped = block_on(self, members::drop_store(self, NODES, STORE));
        assert_eq!(dropped, Ok(vec![]), "every node answers");
    }
}

impl Turns for Several {
    fn end_turn(&self) {
        self.endpoints.iter().for_each(Turns::end_turn);
    }
}

impl Fabric for Several {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        self.endpoint(node).run(node, chain, reply).await
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        let ask = serde_json::from_slice(request).expect("a request to a node's catalog");
        let then = (self.before.borrow_mut())(node, &ask);
        match then {
            Then::Unreachable => {
                return Err(FabricError::Unreachable { node, reason: "the test says so".into() });
            }
            Then::Refused => return Err(FabricError::Refused("the node has too much to do".into())),
            _ => self.endpoint(node).call(node, service, request, answer).await?,
        }
        match then {
            Then::Unanswered => {
                Err(FabricError::Lost { node, ran: Ran::Unknown, reason: "the answer was lost".into() })
            }
            Then::Answers(change) => {
                let mut answered = serde_json::from_slice(answer).expect("an answer");
                change(&mut answered);
                *answer = serde_json::to_vec(&answered).expect("plain data");
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.endpoint(node).retire(node, key, buffer);
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.endpoint(node).capabilities(node)
    }
}

impl Clock for Several {
    fn now(&self) -> Duration {
        self.now.get()
    }

    async fn sleep(&self, duration: Duration) {
        self.now.set(self.now.get() + duration);
    }
}

fn homes() -> Vec<Home> {
    (0..NODES).map(|_| Home::new(14)).collect()
}

fn membership(store: &Store) -> &Membership {
    store.membership.as_ref().expect("a store with several members")
}

/// Another client drops the store and creates another one while this client fetches the keys of the members.
pub(crate) fn members_of_two_attempts_are_never_in_one_list() {
    let homes = homes();
    let (client, other) = (Several::new(&homes, &[0, 1, 2]), Several::new(&homes, &[0, 1, 2]));
    client.create(3, [1, 1]).expect("the nodes have memory");
    let mut is_replaced = false;
    client.before_each(move |node, ask| {
        if matches!(ask, Ask::OpenStore { .. }) && node == NodeId(1) && !is_replaced {
            is_replaced = true;
            other.drop_store();
            other.create(3, [2, 2]).expect("the nodes have memory");
        }
        Then::Runs
    });
    let members = client.open().expect("the second store");
    let attempts: Vec<Attempt> = members
        .list()
        .iter()
        .map(|member| membership(member.store.as_ref().expect("the member answers")).attempt)
        .collect();
    assert_eq!(attempts, [[2, 2]; 3]);
}

/// The creator cannot tell the first member to commit, so another client commits the store.
pub(crate) fn a_creation_without_a_decision_may_have_created_the_store() {
    for fate in [|| Then::Unreachable, || Then::Refused] {
        let homes = homes();
        let (client, other) = (Several::new(&homes, &[0, 1, 2]), Several::new(&homes, &[0, 1, 2]));
        client.before_each(move |_, ask| match ask {
            Ask::Decide { .. } => fate(),
            _ => Then::Runs,
        });
        match client.create(3, [1, 1]) {
            Err(StoreError::Fabric(error)) => assert_eq!(error.ran(), Ran::Unknown, "{error}"),
            other => panic!("expected an unknown outcome, got {other:?}"),
        }
        assert_eq!(other.open().expect("all members are PREPARED").list().len(), 3);
    }
}

/// One member was certainly not prepared, so nobody can commit the store.
pub(crate) fn a_creation_without_a_member_has_created_nothing() {
    let homes = homes();
    let (client, other) = (Several::new(&homes, &[0, 1, 2]), Several::new(&homes, &[0, 1, 2]));
    client.before_each(|node, ask| match ask {
        Ask::PrepareStore { .. } if node == NodeId(2) => Then::Unreachable,
        Ask::Decide { .. } => Then::Unreachable,
        _ => Then::Runs,
    });
    match client.create(3, [1, 1]) {
        Err(StoreError::Fabric(error)) => assert_eq!(error.ran(), Ran::No, "{error}"),
        other => panic!("expected an error, got {other:?}"),
    }
    assert!(matches!(other.open(), Err(StoreError::BeingCreated { .. })));
    other.create(3, [2, 2]).expect("the name is free once the first attempt is aborted");
}

/// The creator loses a member's answer, and wants to abort. Another client has committed the store before.
pub(crate) fn a_creation_returns_each_member_with_its_own_node() {
    let homes = homes();
    let (client, other) = (Several::new(&homes, &[0, 1, 2]), Several::new(&homes, &[0, 1, 2]));
    client.before_each(move |node, ask| match ask {
        Ask::PrepareStore { .. } if node == NodeId(1) => Then::Unanswered,
        Ask::Decide { decision: Decision::Abort, .. } => {
            other.open().expect("all members are PREPARED");
            Then::Runs
        }
        _ => Then::Runs,
    });
    let created = client.create(3, [1, 1]).expect("the other client has committed the store");
    let found: Vec<(u32, u32)> =
        created.iter().map(|(node, store)| (node.0, membership(store).index)).collect();
    assert_eq!(found, [(0, 0), (2, 2)], "node 1 did not answer");
}

/// A client lists the nodes in another order than the creator, and two nodes do not answer for a while.
pub(crate) fn a_silent_member_is_not_lost() {
    let homes = homes();
    let creator = Several::new(&homes, &[0, 1, 2]);
    creator.create(2, [1, 1]).expect("the nodes have memory");
    let is_silent = |of: &Result<Store, StoreError>| matches!(of, Err(StoreError::Fabric(_)));
    // Node 2, without a member, has the place of member 0.
    let client = Several::new(&homes, &[2, 0, 1]);
    client.before_each(|node, _| if node == NodeId(1) { Then::Unreachable } else { Then::Runs });
    let members = client.open().expect("member 1 answers");
    assert!(is_silent(&members.list()[0].store), "{:?}", members.list()[0].store);

    creator.drop_store();
    creator.create(3, [2, 2]).expect("the nodes have memory");
    client.before_each(|node, _| if node == NodeId(0) { Then::Runs } else { Then::Unreachable });
    let members = client.open().expect("member 2 answers");
    assert!(members.list()[..2].iter().all(|member| is_silent(&member.store)), "{members:?}");
    let nodes = client.endpoints.len() as u32;
    let options = Options::default();
    let opening = AnyKv::of(Rc::clone(&client), nodes, &members, &options);
    let mut kv = block_on(&client, opening).expect("one member answers");
    client.before_each(|_, _| Then::Runs);
    for key in 0..60u32 {
        let put: Result<(), KvError> = block_on(&client, kv.put(&key.to_le_bytes(), b"value"));
        assert_eq!(put, Ok(()), "the members have their memory: key {key}");
    }
}

/// The store on one node is replaced by one with several members while a client opens it.
pub(crate) fn a_store_on_one_node_may_become_one_on_several() {
    let homes = homes();
    let (client, other) = (Several::new(&homes, &[0, 1, 2]), Several::new(&homes, &[0, 1, 2]));
    client.create(1, [1, 1]).expect("the nodes have memory");
    let mut is_replaced = false;
    client.before_each(move |_, ask| {
        if matches!(ask, Ask::OpenStore { .. }) && !is_replaced {
            is_replaced = true;
            other.drop_store();
            other.create(3, [2, 2]).expect("the nodes have memory");
        }
        Then::Runs
    });
    assert_eq!(client.open().expect("the second store").list().len(), 3);
}

/// The pool names a node twice.
pub(crate) fn a_node_that_is_named_twice_is_refused() {
    let homes = homes();
    let client = Several::new(&homes, &[0, 1, 0]);
    let twice = "the nodes 0 and 2 of the pool are one node: name each node once in --pool";
    assert_eq!(client.create(3, [1, 1]), Err(StoreError::Gone(twice.into())));
    Several::new(&homes, &[0, 1, 2]).create(3, [1, 1]).expect("the nodes have memory");
    assert_eq!(client.open(), Err(StoreError::Gone(twice.into())));
}

/// The store in an answer, if there is one.
fn store_of(answer: &mut Answer) -> Option<&mut Store> {
    match answer {
        Answer::Store(store) => Some(store),
        Answer::Found(found) => found.store.as_mut(),
        _ => None,
    }
}

fn change_members(answer: &mut Answer, change: fn(&mut Membership)) {
    if let Some(membership) = store_of(answer).and_then(|store| store.membership.as_mut()) {
        change(membership);
    }
}

/// A change to an answer, and what the answer then has.
type Change = (&'static str, fn(&mut Answer));

/// Answers that no correct node gives. One node gives them.
const HOSTILE: &[Change] = &[
    ("an index out of range", |answer| change_members(answer, |of| of.index = u32::MAX)),
    ("the index of another member", |answer| change_members(answer, |of| of.index = (of.index + 1) % 3)),
    ("no members", |answer| change_members(answer, |of| of.members.clear())),
    ("one member", |answer| change_members(answer, |of| of.members.truncate(1))),
    ("too many members", |answer| {
        change_members(answer, |of| of.members = of.members.repeat(100));
    }),
    ("a member twice", |answer| {
        change_members(answer, |of| of.members[(of.index as usize + 1) % 3] = of.members[of.index as usize]);
    }),
    ("an aborted member", |answer| change_members(answer, |of| of.state = MemberState::Aborted)),
    ("a configuration that does not exist", |answer| change_members(answer, |of| of.configuration = 0)),
    ("another name", |answer| {
        store_of(answer).into_iter().for_each(|store| store.name = "other".into());
    }),
    ("another memory", |answer| {
        store_of(answer).into_iter().for_each(|store| store.incarnation ^= 1);
    }),
    ("another answer", |answer| *answer = Answer::Done),
];

/// Returns whether this is a request whose answer describes a store.
fn describes(ask: &Ask) -> bool {
    matches!(ask, Ask::FindStore { .. } | Ask::OpenStore { .. } | Ask::PrepareStore { .. })
}

/// A node answers what no correct node answers: to all requests, or only to those for a member's key.
pub(crate) fn an_impossible_answer_is_not_understood() {
    let homes = homes();
    let client = Several::new(&homes, &[0, 1, 2]);
    client.create(3, [1, 1]).expect("the nodes have memory");
    for hostile in 0..NODES {
        for &(what, change) in HOSTILE {
            for is_key_alone in [false, true] {
                client.before_each(move |node, ask| {
                    let is_asked =
                        if is_key_alone { matches!(ask, Ask::OpenStore { .. }) } else { describes(ask) };
                    if node.0 == hostile && is_asked { Then::Answers(change) } else { Then::Runs }
                });
                match client.open() {
                    Err(StoreError::Gone(reason)) => {
                        assert!(reason.contains("is not understood"), "{what}, {is_key_alone}: {reason}");
                    }
                    other => panic!("node {hostile} answers {what}, {is_key_alone}: {other:?}"),
                }
            }
        }
    }
    // Two members that are well-formed, and contradict each other.
    client.before_each(|node, _| {
        let change: fn(&mut Answer) = |answer| {
            store_of(answer).into_iter().for_each(|store| store.kind = "pilaf".into());
        };
        if node == NodeId(1) { Then::Answers(change) } else { Then::Runs }
    });
    assert!(matches!(client.open(), Err(StoreError::Gone(reason)) if reason.contains("is not understood")));
    client.before_each(|node, _| {
        let change: fn(&mut Answer) = |answer| change_members(answer, |of| of.members.swap(0, 2));
        if node == NodeId(1) { Then::Answers(change) } else { Then::Runs }
    });
    assert!(matches!(client.open(), Err(StoreError::Gone(reason)) if reason.contains("is not understood")));
    client.before_each(|_, _| Then::Runs);
    assert!(client.open().is_ok(), "no client changed the store");
}

/// A node answers to a creation what no correct node answers.
pub(crate) fn an_impossible_answer_aborts_a_creation() {
    for hostile in 0..NODES {
        for &(what, change) in HOSTILE {
            let homes = homes();
            let (client, other) = (Several::new(&homes, &[0, 1, 2]), Several::new(&homes, &[0, 1, 2]));
            client.before_each(move |node, ask| {
                let is_asked = matches!(ask, Ask::PrepareStore { .. });
                if node.0 == hostile && is_asked { Then::Answers(change) } else { Then::Runs }
            });
            let created = client.create(3, [1, 1]);
            assert!(created.is_err(), "node {hostile} answers {what}: {created:?}");
            assert!(
                matches!(other.open(), Err(StoreError::Gone(reason)) if reason.contains("there is no store"))
            );
        }
    }
    let nodes = homes();
    let client = Several::new(&nodes, &[0, 1, 2]);
    client.before_each(|_, ask| match ask {
        Ask::Decide { .. } => Then::Answers(|answer| {
            if let Answer::Decided(decided) = answer {
                decided.state = MemberState::Prepared;
            }
        }),
        _ => Then::Runs,
    });
    match client.create(3, [1, 1]) {
        Err(StoreError::Fabric(error)) => assert_eq!(error.ran(), Ran::Unknown, "{error}"),
        other => panic!("expected an unknown outcome, got {other:?}"),
    }
    let nodes = homes();
    let client = Several::new(&nodes, &[0, 1, 2]);
    client.before_each(|_, ask| match ask {
        Ask::PrepareStore { .. } => Then::Answers(|answer| *answer = Answer::Done),
        Ask::Decide { .. } => Then::Answers(|answer| {
            if let Answer::Decided(decided) = answer {
                decided.state = MemberState::Committed;
            }
        }),
        _ => Then::Runs,
    });
    let created = client.create(3, [1, 1]);
    assert!(created.is_err(), "an attempt without a member is committed: {created:?}");
}
