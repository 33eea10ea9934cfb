//! SMART over sessions that a pool opens again. A node grants keys for one session only, so the client fetches the
//! store's key in each, and goes on.

use farside_remote::clock::Clock;
use farside_remote::control::{Answer, Ask};
use farside_remote::fabric::{Ran, ServiceId};
use farside_remote::{
    Addr, Capabilities, Chain, ChainBuf, Fabric, FabricError, Key, NodeId, Reply, Status, read,
};
use farside_sim::clock::ProcessClock;
use farside_sim::fabric::session::{Endpoint, Identity};
use farside_sim::fault::{Struck, Target};
use farside_sim::network::{HostId, Network, Wire};
use farside_sim::node::{Kinds, Node, Options as NodeOptions};
use farside_sim::world::{MICROS, MILLIS, ProcessId, SECONDS, World};
use farside_systems::index::smart::system::SmartKind;
use farside_systems::index::smart::{KIND, Smart, Spec};
use farside_systems::index::{Index, IndexError};
use farside_systems::members;
use farside_systems::system::{Options, System};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

const NODE: NodeId = NodeId(0);
const LEASE: Duration = Duration::from_millis(2);

/// A node with the store `s`.
struct Scene {
    world: World,
    network: Network,
    node: Node,
    clients: Cell<u64>,
}

impl Scene {
    fn new() -> Rc<Scene> {
        let world = World::new(1);
        let struck = Rc::new(Struck::default());
        let network = Network::new(&world, Wire { delay_ns: 2 * MICROS, jitter_ns: 0 }, &struck);
        let at = network.add_host();
        let options =
            NodeOptions { engines: 1, is_reliable: true, memory_bytes: 24 << 20, ..NodeOptions::default() };
        let kinds: Kinds = Rc::new(farside_systems::registry::all_kinds);
        let node = Node::start(&world, &network, at, NODE, kinds, options);
        Rc::new(Scene { world, network, node, clients: Cell::new(0) })
    }

    /// Runs a test with the node's store.
    fn run<T: 'static>(self: &Rc<Scene>, test: impl Future<Output = T> + 'static) -> T {
        let own = Rc::clone(self);
        let done = self.world.complete(10 * SECONDS, async move {
            let spec =
                Spec { value_max: 40, chunk: 1 << 14, ids: 4, lanes: 2, lease_us: 2_000, ..Spec::default() };
            let (name, kind) = ("s".to_owned(), KIND.to_owned());
            let parameters = serde_json::to_string(&spec).expect("plain data");
            let ask = Ask::CreateStore { name, kind, parameters, quota: 1 << 20 };
            let created = own.node.answer(ask).await;
            assert!(matches!(created, Ok(Answer::Store(_))), "{created:?}");
            test.await
        });
        done.expect("the test ends")
    }

    async fn open(self: &Rc<Scene>) -> Client {
        let number = self.clients.get() + 1;
        self.clients.set(number);
        let process = self.world.start_process();
        let sessions = Rc::new(Sessions {
            process,
            host: self.network.add_host(),
            clock: ProcessClock::new(&self.world, 0, self.network.struck(), Target::Client(0)),
            identity: number.into(),
            current: RefCell::new(None),
            number: Cell::new(0),
            binding: RefCell::new(None),
            chains: Cell::new(0),
            reopens_before: Cell::new(None),
            scene: Rc::clone(self),
        });
        sessions.reopen().await;
        let opening = async {
            let members = members::open(&sessions, 1, "s").await.expect("the store exists");
            let options = Options { entropy: number, node_cache: Some(1 << 20), ..Options::NONE };
            SmartKind::open(Rc::clone(&sessions), &members, &options).await
        };
        let index = opening.await.expect("an id is free");
        self.world.spawn(process, index.keeper());
        Client { sessions, index }
    }
}

struct Client {
    sessions: Rc<Sessions>,
    index: Smart<Rc<Sessions>>,
}

impl Client {
    async fn get(&mut self, key: u64) -> Option<Vec<u8>> {
        let got = self.index.get(&key.to_be_bytes()).await;
        got.expect("nothing is lost while no request is in flight").map(<[u8]>::to_vec)
    }

    async fn put(&mut self, key: u64, value: &[u8]) -> Result<(), IndexError> {
        self.index.put(&key.to_be_bytes(), value).await
    }
}

/// The sessions of a client with the node, one after the other.
struct Sessions {
    scene: Rc<Scene>,
    process: ProcessId,
    host: HostId,
    clock: ProcessClock,
    identity: u128,
    current: RefCell<Option<Rc<Endpoint>>>,
    number: Cell<u64>,
    /// The request that has bound the first session, which binds the others, too.
    binding: RefCell<Option<Vec<u8>>>,
    /// Number of chains so far, and the chain before which the next session is opened.
    chains: Cell<u64>,
    reopens_before: Cell<Option<u64>>,
}

impl Sessions {
    fn current(&self) -> Rc<Endpoint> {
        Rc::clone(self.current.borrow().as_ref().expect("a session"))
    }

    /// Replaces the session by the next one, and binds it as the one before.
    async fn reopen(&self) {
        let incarnation = self.number.get() + 1;
        let identity = Identity { identity: self.identity, incarnation, silence: 60 * MILLIS };
        let Sessions { scene, process, host, clock, .. } = self;
        let opened = Endpoint::open(&scene.node, 0, *process, *host, clock, identity).await;
        let next = opened.expect("the node is there");
        let binding = self.binding.borrow().clone();
        if let Some(binding) = binding {
            next.call(NODE, ServiceId::NODE, &binding, &mut Vec::new()).await.expect("it is not fenced");
        }
        self.current.replace(Some(next));
        self.number.set(incarnation);
    }
}

impl Fabric for Sessions {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        self.chains.set(self.chains.get() + 1);
        self.current().run(node, chain, reply).await?;
        if self.reopens_before.get() == Some(self.chains.get() + 1) {
            self.reopen().await;
        }
        Ok(())
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        self.current().call(node, service, request, answer).await?;
        if matches!(serde_json::from_slice(request), Ok(Ask::Bind { .. })) {
            self.binding.replace(Some(request.to_vec()));
        }
        Ok(())
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.current().retire(node, key, buffer);
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.current().capabilities(node)
    }

    fn session_number(&self, _node: NodeId) -> u64 {
        self.number.get()
    }
}

impl Clock for Sessions {
    fn now(&self) -> Duration {
        self.clock.now()
    }

    fn wall(&self) -> Duration {
        self.clock.wall()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        self.clock.sleep(duration)
    }
}

#[test]
fn a_client_goes_on_over_the_next_session() {
    let scene = Scene::new();
    let own = Rc::clone(&scene);
    scene.run(async move {
        let mut client = own.open().await;
        client.put(1, b"a").await.expect("a put");
        client.put(2, b"b").await.expect("a put");
        let id = client.index.id();

        // The key of the first session opens nothing in the next one.
        let members = members::open(&client.sessions, 1, "s").await.expect("the store exists");
        client.sessions.reopen().await;
        let extent = members.store().extent();
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(extent.key);
        let word = chain.also(read(Addr::new(extent.at), 8));
        client.sessions.run(NODE, &chain, &mut reply).await.expect("an answer");
        assert_eq!(reply.get(word), Err(Status::Access));

        assert_eq!(client.get(1).await, Some(b"a".to_vec()));
        client.sessions.reopen().await;
        client.put(1, b"c").await.expect("an update");
        client.sessions.reopen().await;
        client.put(3, b"d").await.expect("an insert");
        client.sessions.reopen().await;
        assert_eq!(client.index.delete(&2_u64.to_be_bytes()).await, Ok(true));
        client.sessions.reopen().await;
        let mut found = Vec::new();
        let visit = |key: &[u8], value: &[u8]| found.push((key[7], value.to_vec()));
        assert_eq!(client.index.scan(&[0; 8], 10, visit).await, Ok(2));
        assert_eq!(found, [(1, b"c".to_vec()), (3, b"d".to_vec())]);

        // It renews its lease, so nobody recovers it.
        client.sessions.reopen().await;
        let mut other = own.open().await;
        client.sessions.sleep(4 * LEASE).await;
        other.index.heal().await.expect("a healing");
        assert_eq!(other.index.recovered(), 0);
        assert_eq!(client.get(1).await, Some(b"c".to_vec()));
        assert_eq!(client.index.id(), id);
    });
}

/// An operation may fail if the session is lost in its midst, but it says so, and no chain is refused for its key.
#[test]
fn an_operation_whose_session_is_replaced_is_never_refused() {
    let scene = Scene::new();
    let own = Rc::clone(&scene);
    let failed = scene.run(async move {
        let (mut other, mut failed) = (own.open().await, 0);
        for chains in 1..10 {
            for key in [chains, 7] {
                let mut client = own.open().await;
                other.put(7, b"before").await.expect("a put");
                let before = other.get(key).await;
                let reopens_before = client.sessions.chains.get() + chains;
                client.sessions.reopens_before.set(Some(reopens_before));
                let put = client.put(key, b"after").await;
                let found = other.get(key).await;
                match &put {
                    Ok(()) => assert_eq!(found.as_deref(), Some(&b"after"[..])),
                    Err(IndexError::Fabric(error @ FabricError::Unreachable { .. })) => {
                        failed += 1;
                        assert_eq!(error.ran(), Ran::No);
                        assert_eq!(found, before, "{error}");
                    }
                    // After the change, or after the client has given up.
                    Err(IndexError::Unsettled(_) | IndexError::Lost) => failed += 1,
                    Err(other) => panic!("a put with a session replaced before chain {chains}: {other}"),
                }
                // If the client has a lock, another one recovers it.
                other.put(key, b"later").await.expect("a put");
                drop(client);
            }
        }
        failed
    });
    assert!(failed > 0, "the session was never replaced in the midst of a put");
}
