//! Sessions of a bound client that a pool opens again after its node was killed and restarted, in a process of its own.

use crate::support::process::{Child, PATIENCE, Role, until};
use farside_fabrics::direct::Direct;
use farside_fabrics::executor::block_on;
use farside_fabrics::memory::{Mapping, Pages};
use farside_fabrics::nodes::{Nodes, Open};
use farside_fabrics::session::client::Config;
use farside_fabrics::session::endpoint::Endpoint;
use farside_fabrics::tcp::TcpLine;
use farside_fabrics::{shm, timer};
use farside_node::host::{Host, Listen, Options};
use farside_remote::control::{Answer, Ask, Store};
use farside_remote::fabric::ServiceId;
#[cfg(farside_mutants)]
use farside_remote::mutant::Mutant;
use farside_remote::{Addr, ChainBuf, Fabric, FabricError, NodeId, Reply, read};
use farside_systems::identity::{self, Identity};
use farside_systems::registry::all_kinds;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const NODE: NodeId = NodeId(0);
const MIB: u64 = 16;

/// A node with a memory file, the store `s`, and a client of that store that may or may not open sessions.
struct Scene {
    folder: tempfile::TempDir,
    child: Child,
    store: Store,
    pool: Nodes<Direct>,
    may_open: Arc<AtomicBool>,
}

impl Scene {
    fn new() -> Scene {
        let folder = tempfile::tempdir().expect("a folder");
        let mut child = start(folder.path());
        let store = child.create("s", 4);
        let (socket, may_open) = (folder.path().join("socket"), Arc::new(AtomicBool::new(true)));
        let permitted = Arc::clone(&may_open);
        let open: Arc<Open<Direct>> = Arc::new(move |node| {
            if !permitted.load(Ordering::Acquire) {
                return Err("the test does not permit it yet".into());
            }
            shm::connect(&socket, node).map_err(|error| error.to_string())
        });
        let pool = Nodes::open(1, open);
        Scene { folder, child, store, pool, may_open }
    }

    fn bind(&self, nonce: u64) {
        let bound = identity::bind(&self.pool, NODE, &self.store, Identity { client: 1, nonce });
        block_on(&self.pool, bound).expect("nobody has fenced it");
    }

    /// Reads a word of the store.
    fn read(&self) -> Result<(), FabricError> {
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(self.store.extent().key);
        let word = chain.also(read(Addr::new(self.store.table_at), 8));
        block_on(&self.pool, self.pool.run(NODE, &chain, &mut reply))?;
        reply.get(word).map(drop).map_err(|status| FabricError::Refused(status.to_string()))
    }

    /// Kills the node and starts it again. The client has lost its session and may not open another one yet.
    fn restart(&mut self) {
        self.may_open.store(false, Ordering::Release);
        self.child.signal(rustix::process::Signal::KILL);
        self.child.wait();
        until("the client has noticed", || self.read().is_err() && self.pool.session(NODE).is_err());
        self.child = start(self.folder.path());
    }

    fn fence(&mut self, nonce: u64) {
        let fence = Ask::Fence { name: "s".into(), id: self.store.id, nonce };
        assert_eq!(self.child.ask(&fence), Answer::Done);
    }

    /// Lets the client open a session. Returns the outcome of its first request that is not refused for want of one.
    fn read_again(&self) -> Result<(), FabricError> {
        self.may_open.store(true, Ordering::Release);
        let mut outcome = Ok(());
        until("the client has a session, or will have none", || {
            outcome = self.read();
            let waits = matches!(outcome, Err(FabricError::Unreachable { .. }));
            if waits {
                block_on(&self.pool, timer::sleep(Duration::from_millis(1)));
            }
            !waits
        });
        outcome
    }
}

fn start(folder: &Path) -> Child {
    let (socket, file) = (folder.join("socket"), folder.join("memory"));
    let mut child = Child::start(Role::FileNode { socket, file, mib: MIB });
    let () = child.hear("ready");
    child
}

/// The holder of nonce 7 is fenced while its node restarts.
///
/// # Errors
/// The holder's chain has run after the fence.
fn fenced_meanwhile() -> Result<(), String> {
    let mut scene = Scene::new();
    scene.bind(7);
    scene.read().expect("the key opens the store");
    scene.restart();
    scene.fence(7);
    match scene.read_again() {
        Err(error) if error.is_fenced() => {}
        other => return Err(format!("after its fence, the holder found {other:?}")),
    }
    // It stays so, and the pool does not wait for another session.
    let error = scene.read().expect_err("it is fenced");
    assert!(error.is_fenced() && error.to_string().contains("reconnect as a new client"), "{error}");
    assert_eq!(scene.pool.session_number(NODE), 1);
    Ok(())
}

#[test]
fn a_holder_that_is_fenced_while_its_node_restarts_runs_no_chain() {
    fenced_meanwhile().expect("the key of the store survives the restart, and the binding does, too");
}

#[test]
fn a_reopened_session_is_bound_again() {
    let mut scene = Scene::new();
    scene.bind(7);
    scene.restart();
    assert_eq!(scene.read_again(), Ok(()));
    assert_eq!(scene.pool.session_number(NODE), 2);
    scene.fence(7);
    let error = scene.read().expect_err("the second session is bound, so it is fenced");
    assert!(error.is_fenced(), "{error}");
}

#[test]
fn a_client_that_is_fenced_over_tcp_gets_no_other_session() {
    let memory = Mapping::create(MIB << 20, Pages::Small).expect("memory");
    let anywhere = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let options = Options { listen: vec![Listen::Tcp(anywhere)], ..Options::default() };
    let host = Host::start(memory, all_kinds(), options).expect("a node");
    let Listen::Tcp(address) = host.listening()[0] else { panic!("it listens on TCP") };
    let (name, kind, parameters) = ("s".to_owned(), "prism-kv".to_owned(), r#"{"items": 100}"#.to_owned());
    let created = host.ask(Ask::CreateStore { name, kind, parameters, quota: 4 << 20 }, PATIENCE);
    let Ok(Answer::Store(store)) = created else { panic!("a store") };
    let opened = AtomicU64::new(1);
    let open: Arc<Open<Endpoint<TcpLine>>> = Arc::new(move |node| {
        let line = TcpLine::connect(address).map_err(|error| error.to_string())?;
        let incarnation = opened.fetch_add(1, Ordering::Relaxed);
        let config = Config { identity: 5, incarnation, nonce: incarnation, ..Config::default() };
        Endpoint::open(line, node, config).map_err(|error| error.to_string())
    });
    let pool = Nodes::open(1, open);
    let bound = identity::bind(&pool, NODE, &store, Identity { client: 1, nonce: 7 });
    block_on(&pool, bound).expect("nobody has fenced it");
    let ask = || {
        let open = serde_json::to_vec(&Ask::OpenStore { name: "s".into() }).expect("plain data");
        block_on(&pool, pool.call(NODE, ServiceId::NODE, &open, &mut Vec::new()))
    };
    ask().expect("it is not fenced");
    let fenced = host.ask(Ask::Fence { name: "s".into(), id: store.id, nonce: 7 }, PATIENCE);
    assert_eq!(fenced, Ok(Answer::Done));
    until("the pool knows that it gets no session", || {
        let asked = ask();
        assert!(asked.is_err(), "no request is answered after the fence");
        // The pool looks for opened sessions while it waits.
        block_on(&pool, timer::sleep(Duration::from_millis(1)));
        pool.session(NODE).err().is_some_and(|error| error.is_fenced())
    });
    let error = ask().expect_err("it is fenced");
    assert!(error.is_fenced() && pool.session_number(NODE) == 1, "{error}");
}

#[test]
fn the_binding_to_a_dropped_store_is_void() {
    let mut scene = Scene::new();
    scene.bind(7);
    scene.restart();
    assert_eq!(scene.child.ask(&Ask::DropStore { name: "s".into() }), Answer::Done);
    scene.child.create("s", 4);
    let refused = scene.read_again().expect_err("the store was replaced");
    assert!(!refused.is_fenced(), "{refused}");
    assert_eq!(scene.pool.session_number(NODE), 2);
}

#[cfg(farside_mutants)]
#[test]
fn an_unbound_session_of_a_fenced_client_is_detected() {
    Mutant::switch(Some(farside_fabrics::mutants::REOPENED_UNBOUND));
    let found = fenced_meanwhile();
    Mutant::switch(None);
    println!("ReopenedUnbound: killed, for {}", found.expect_err("ReopenedUnbound lives"));
    println!("1 of 1 mutants were killed");
}
