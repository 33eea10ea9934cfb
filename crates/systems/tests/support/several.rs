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
use farside_systems::heal::{Action, Healed, PATIENCE, Seen, heal};
use farside_systems::kv::{AnyKv, Kv, KvError};
use farside_systems::members::{self, New, WithoutFirst};
use farside_systems::store::{Member, Members, StoreError};
use farside_systems::system::{Options, Sizing};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Number of nodes.
const NODES: u32 = 3;
/// Name of the store.
const STORE: &str = "s";

/// A different number for each recoverer.
fn entropy() -> u64 {
    static RECOVERERS: AtomicU64 = AtomicU64::new(1);
    RECOVERERS.fetch_add(1, Ordering::Relaxed)
}

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
    /// What happens during this client's next sleep of [`PATIENCE`] or more.
    while_asleep: RefCell<Option<Box<dyn FnOnce()>>>,
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
            while_asleep: RefCell::default(),
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

    fn heal(self: &Rc<Several>) -> (Vec<String>, Seen) {
        let mut healed = Vec::new();
        let healing = heal(self, self.endpoints.len() as u32, None, PATIENCE, entropy(), |one: Healed| {
            healed.push(one.to_string());
        });
        let seen = block_on(self, healing).expect("a node answers");
        (healed, seen)
    }

    /// Makes all of this client's requests after the next `count` fail, as if it had died.
    fn dies_after(&self, count: u64) {
        let mut left = count;
        self.before_each(move |_, _| match left.checked_sub(1) {
            Some(now) => {
                left = now;
                Then::Runs
            }
            None => Then::Unreachable,
        });
    }

    /// Makes this client's requests to decide fail from now on, as if it had died.
    fn dies_before_deciding(&self) {
        self.before_each(|_, ask| match ask {
            Ask::Decide { .. } => Then::Unreachable,
            _ => Then::Runs,
        });
    }

    fn drop_store(self: &Rc<Several>) {
        let dropped = block_on(self, members::drop_store(self, NODES, STORE, WithoutFirst::Refuse));
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

    fn wall(&self) -> Duration {
        self.now.get()
    }

    async fn sleep(&self, duration: Duration) {
        self.now.set(self.now.get() + duration);
        let action = (duration >= PATIENCE).then(|| self.while_asleep.take()).flatten();
        if let Some(action) = action {
            action();
        }
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
    let created = creator.create(2, [1, 1]).expect("the nodes have memory");
    let [first, second] = [0, 1].map(|index: usize| created[index].0.0 as usize);
    let other = 3 - first - second;
    let is_silent = |of: &Result<Store, StoreError>| matches!(of, Err(StoreError::Fabric(_)));
    // The node without a member has the place of member 0.
    let client = Several::new(&homes, &[other, first, second]);
    client.before_each(|node, _| if node == NodeId(1) { Then::Unreachable } else { Then::Runs });
    let members = client.open().expect("member 1 answers");
    assert!(is_silent(&members.list()[0].store), "{:?}", members.list()[0].store);

    creator.drop_store();
    creator.create(3, [2, 2]).expect("the nodes have memory");
    client.before_each(|node, _| if node == NodeId(0) { Then::Runs } else { Then::Unreachable });
    let members = client.open().expect("one member answers");
    let silent = members.list().iter().map(|member| is_silent(&member.store));
    assert!(silent.enumerate().all(|(index, is_silent)| is_silent == (index != other)), "{members:?}");
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
    ("the highest configuration", |answer| change_members(answer, |of| of.configuration = u64::MAX)),
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

/// What each of the nodes holds of the store: the states of its members.
fn states(homes: &[Home]) -> Vec<Option<MemberState>> {
    let client = Several::new(homes, &[0, 1, 2]);
    let listed = |node: NodeId| {
        let mut answer = Vec::new();
        let request = serde_json::to_vec(&Ask::ListStores).expect("plain data");
        let call = client.call(node, ServiceId::NODE, &request, &mut answer);
        block_on(&client, call).expect("the node answers");
        let Ok(Answer::Stores(stores)) = serde_json::from_slice(&answer) else { panic!("a list") };
        stores.iter().map(|store| membership(store).state).next()
    };
    (0..NODES).map(NodeId).map(listed).collect()
}

/// Clients die within creations and drops. A recoverer completes or aborts each, and then finds nothing.
pub(crate) fn heal_aborts_completes_and_drops_what_is_unfinished() {
    let homes = homes();
    let (client, recoverer) = (Several::new(&homes, &[0, 1, 2]), Several::new(&homes, &[2, 0, 1]));
    assert_eq!(recoverer.heal(), (vec![], Seen::default()));

    client.before_each(|node, ask| match ask {
        Ask::PrepareStore { .. } if node == NodeId(2) => Then::Unreachable,
        Ask::Decide { .. } => Then::Unreachable,
        _ => Then::Runs,
    });
    assert!(client.create(3, [1, 1]).is_err());
    assert_eq!(states(&homes), [Some(MemberState::Prepared), Some(MemberState::Prepared), None]);
    let (healed, seen) = recoverer.heal();
    assert_eq!(healed, ["store 's': created at 2 of 3 nodes, attempt aborted"]);
    assert_eq!((seen.stores, states(&homes)), (0, vec![None; 3]));

    client.dies_before_deciding();
    assert!(client.create(3, [2, 2]).is_err());
    assert_eq!(states(&homes), [Some(MemberState::Prepared); 3]);
    let (healed, seen) = recoverer.heal();
    assert_eq!(healed, ["store 's': prepared at 3 of 3 nodes, creation completed"]);
    assert_eq!((seen.stores, states(&homes)), (1, vec![Some(MemberState::Committed); 3]));

    client.before_each(|node, ask| match ask {
        Ask::Decide { .. } if node != NodeId(0) => Then::Unreachable,
        _ => Then::Runs,
    });
    let dropped = block_on(&client, members::drop_store(&client, NODES, STORE, WithoutFirst::Refuse));
    assert_eq!(dropped, Ok(vec![NodeId(1), NodeId(2)]));
    assert_eq!(states(&homes), [None, Some(MemberState::Committed), Some(MemberState::Committed)]);
    let (healed, _) = recoverer.heal();
    assert_eq!(healed, ["store 's': left at 2 of 3 nodes by a drop, drop completed"]);
    assert_eq!(states(&homes), [None; 3]);
    assert_eq!(recoverer.heal(), (vec![], Seen::default()));
}

/// A recoverer meets an attempt whose creator lives.
pub(crate) fn heal_lets_a_living_creator_finish() {
    let homes = homes();
    let (client, recoverer) = (Several::new(&homes, &[0, 1, 2]), Several::new(&homes, &[0, 1, 2]));
    let theirs = Rc::clone(&recoverer);
    let healed = Rc::new(RefCell::new(Vec::new()));
    let reported = Rc::clone(&healed);
    let has_begun = Rc::new(Cell::new(false));
    let begun = Rc::clone(&has_begun);
    client.before_each(move |node, ask| {
        if matches!(ask, Ask::PrepareStore { .. }) && node == NodeId(1) && !begun.replace(true) {
            let report = |one: Healed| reported.borrow_mut().push(one);
            let healing = heal(&theirs, NODES, None, Duration::ZERO, entropy(), report);
            block_on(&theirs, healing).expect("the nodes answer");
        }
        Then::Runs
    });
    assert!(client.create(3, [1, 1]).is_err(), "without patience, a recoverer aborts a living creation");
    assert!(matches!(healed.borrow()[..], [Healed { action: Action::Aborted { held: 1, members: 3 }, .. }]));

    // With patience, the creation is complete when the recoverer looks again.
    let creator = Several::new(&homes, &[0, 1, 2]);
    let watching = Several::new(&homes, &[0, 1, 2]);
    client.before_each(|node, ask| match ask {
        Ask::PrepareStore { .. } if node == NodeId(2) => Then::Unreachable,
        Ask::Decide { .. } => Then::Unreachable,
        _ => Then::Runs,
    });
    assert!(client.create(3, [2, 2]).is_err());
    *watching.while_asleep.borrow_mut() = Some(Box::new(move || {
        // This creation aborts the one before, as a retry does.
        creator.create(3, [3, 3]).expect("the name is free once the former attempt is aborted");
    }));
    let (healed, seen) = watching.heal();
    assert_eq!((healed, seen.stores), (vec![], 1));
    assert_eq!(states(&homes), [Some(MemberState::Committed); 3]);
}

/// Two recoverers run at the same time, and each dies after any number of requests.
pub(crate) fn several_recoverers_heal_at_the_same_time_and_die() {
    let homes = homes();
    for attempt in 1..=40u64 {
        let client = Several::new(&homes, &[0, 1, 2]);
        // The creator dies with two members, or with all.
        let is_complete = attempt % 2 == 0;
        client.before_each(move |node, ask| match ask {
            Ask::PrepareStore { .. } if node == NodeId(2) && !is_complete => Then::Unreachable,
            Ask::Decide { .. } => Then::Unreachable,
            _ => Then::Runs,
        });
        assert!(client.create(3, [attempt, 1]).is_err());
        // One dies at each of its requests in turn, in which the other heals from the start to its own death.
        let (one, other) = (Several::new(&homes, &[0, 1, 2]), Several::new(&homes, &[1, 2, 0]));
        other.dies_after(attempt / 2 % 5 + 1);
        let left = Rc::new(Cell::new(attempt / 2));
        one.before_each(move |_, _| {
            let Some(now) = left.get().checked_sub(1) else { return Then::Unreachable };
            left.set(now);
            if now == 0 {
                let _may_die = block_on(&other, heal(&other, NODES, None, PATIENCE, entropy(), drop));
            }
            Then::Runs
        });
        let _may_die = block_on(&one, heal(&one, NODES, None, PATIENCE, entropy(), drop));
        let last = Several::new(&homes, &[0, 2, 1]);
        last.heal();
        let expected = is_complete.then_some(MemberState::Committed);
        // A recoverer that cannot reach a node may have aborted a complete attempt: then it is nowhere.
        let found = states(&homes);
        assert!(found == [expected; 3] || found == [None; 3], "attempt {attempt}: {found:?}");
        if found[0].is_some() {
            last.drop_store();
        }
    }
}

/// A node does not answer, a member is lost to the pool, and a store that does not exist is to be healed.
pub(crate) fn heal_reports_what_it_cannot_heal() {
    let homes = homes();
    let client = Several::new(&homes, &[0, 1, 2]);
    client.create(3, [1, 1]).expect("the nodes have memory");
    let recoverer = Several::new(&homes, &[0, 1, 2]);
    recoverer.before_each(|node, _| if node == NodeId(1) { Then::Unreachable } else { Then::Runs });
    let (healed, seen) = recoverer.heal();
    assert!(matches!(&seen.silent[..], [(NodeId(1), StoreError::Fabric(_))]), "{seen:?}");
    assert!(
        healed.len() == 1 && healed[0].contains("not healed") && healed[0].contains("node 1"),
        "{healed:?}"
    );
    // A pool without one of the nodes.
    let (healed, _) = Several::new(&homes, &[2, 0]).heal();
    assert!(healed.len() == 1 && healed[0].contains("only 2 of their nodes are in the pool"), "{healed:?}");
    client.drop_store();
    client.dies_before_deciding();
    assert!(client.create(3, [2, 2]).is_err());
    let (healed, _) = Several::new(&homes, &[0, 1]).heal();
    assert!(healed.len() == 1 && healed[0].contains("only 2 of their nodes are in the pool"), "{healed:?}");
    assert_eq!(states(&homes), [Some(MemberState::Prepared); 3], "nobody has decided");
    let absent = block_on(&recoverer, heal(&client, NODES, Some("other"), PATIENCE, entropy(), drop));
    assert!(matches!(absent, Err(StoreError::Gone(reason)) if reason.contains("there is no store 'other'")));
}

/// Two clients that list the nodes in other orders create two stores of one name at the same time.
pub(crate) fn clients_with_other_orders_choose_the_same_nodes() {
    for members in [1, 2] {
        for round in 0..8 {
            let homes = homes();
            let (one, other) = (Several::new(&homes, &[0, 1, 2]), Several::new(&homes, &[2, 0, 1]));
            let has_begun = Cell::new(false);
            let won = Rc::new(Cell::new(false));
            let winner = Rc::clone(&won);
            // Both have found the name free before one of them creates the store.
            one.before_each(move |_, ask| {
                let is_creation = matches!(ask, Ask::CreateStore { .. } | Ask::PrepareStore { .. });
                if is_creation && !has_begun.replace(true) {
                    winner.set(other.create(members, [2, round]).is_ok());
                }
                Then::Runs
            });
            let lost = one.create(members, [1, round]);
            assert!(won.get(), "nobody else creates the store at that time");
            assert!(lost.is_err(), "the first node refuses a second store of that name: {lost:?}");
            let opened = Several::new(&homes, &[1, 2, 0]).open().expect("one store");
            assert_eq!(opened.list().len(), members);
        }
    }
}

/// The pool lacks the node of the first member, or that node does not answer. Only that member can decide on a drop.
pub(crate) fn a_drop_without_the_first_member_is_refused_unless_it_is_forgotten() {
    let homes = homes();
    let whole = Several::new(&homes, &[0, 1, 2]);
    let all = [Some(MemberState::Committed); 3];
    let drop_by = |client: &Rc<Several>, without_first| {
        let nodes = client.endpoints.len() as u32;
        block_on(client, members::drop_store(client, nodes, STORE, without_first))
    };
    let rest = Several::new(&homes, &[2, 1]);
    let silent = Several::new(&homes, &[0, 1, 2]);
    silent.before_each(|node, _| if node == NodeId(0) { Then::Unreachable } else { Then::Runs });
    for is_committed in [true, false] {
        if !is_committed {
            whole.dies_before_deciding();
        }
        for client in [&rest, &silent] {
            assert_eq!(whole.create(3, [1, client.endpoints.len() as u64]).is_ok(), is_committed);
            let before = states(&homes);
            assert_eq!(before == all, is_committed);
            match drop_by(client, WithoutFirst::Refuse) {
                Err(StoreError::Gone(reason)) => assert!(reason.contains("drop s --forget"), "{reason}"),
                Err(StoreError::Fabric(error)) => assert_eq!(error.ran(), Ran::No, "{error}"),
                other => panic!("expected a refusal, got {other:?}"),
            }
            assert_eq!(states(&homes), before, "nothing was changed");
            drop_by(client, WithoutFirst::Forget).expect("the other members are dropped");
            assert_eq!(states(&homes), [before[0], None, None]);
            // The first member is back.
            whole.before_each(|_, _| Then::Runs);
            match whole.open() {
                Ok(members) => {
                    let is_lost =
                        |member: &&Member| matches!(member.store, Err(StoreError::MemoryLost { .. }));
                    assert_eq!((members.list().iter().filter(is_lost).count(), is_committed), (2, true));
                }
                Err(error) => {
                    assert!(!is_committed && matches!(error, StoreError::BeingCreated { .. }), "{error}");
                }
            }
            let _may_be_gone = drop_by(&whole, WithoutFirst::Refuse);
            assert_eq!(states(&homes), [None; 3]);
            if !is_committed {
                whole.dies_before_deciding();
            }
        }
    }
}
