//! A node in this process, and its clients. The modules below have nodes and clients in separate processes, and nodes
//! that run step by step.

#![allow(dead_code, reason = "each test binary uses a part of this")]
#![allow(clippy::disallowed_methods, reason = "tests may read the environment")]

pub(crate) mod audit;
pub(crate) mod bank;
#[allow(unsafe_code, reason = "an allocator")]
pub(crate) mod counting;
pub(crate) mod deadly;
pub(crate) mod deadly_bank;
pub(crate) mod deadly_index;
pub(crate) mod deadly_table;
pub(crate) mod index_client;
pub(crate) mod index_script;
pub(crate) mod index_sim;
pub(crate) mod intercept;
pub(crate) mod kept;
pub(crate) mod kept_index;
pub(crate) mod kept_txn;
pub(crate) mod locks;
pub(crate) mod observed;
pub(crate) mod paced;
pub(crate) mod poison;
pub(crate) mod pool;
pub(crate) mod process;
pub(crate) mod replacing;
pub(crate) mod replicas;
pub(crate) mod script;
pub(crate) mod several;
pub(crate) mod steered;
pub(crate) mod stepped;
pub(crate) mod strikes;

use farside_fabrics::direct::Direct;
use farside_fabrics::executor::block_on;
use farside_fabrics::layer::count::Count;
use farside_fabrics::local::{self, LocalNode};
use farside_fabrics::memory::{Mapping, Pages};
use farside_node::host::{Host, Options};
use farside_remote::NodeId;
use farside_remote::control::{Answer, Ask, Store, StoreStat};
use farside_systems::kv::Kv;
use farside_systems::kv::prism_kv::{KIND, PrismKv};
use farside_systems::registry::all_kinds;
use intercept::Intercept;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

pub(crate) type Client = PrismKv<Rc<Count<Direct>>>;
/// A client whose chains can be delayed, stopped or lost.
pub(crate) type Intercepted = PrismKv<Rc<Intercept<'static, Rc<Count<Direct>>>>>;

pub(crate) struct Home {
    pub(crate) host: Arc<Host>,
}

impl Home {
    pub(crate) fn new(mib: u64) -> Home {
        let memory = Mapping::create(mib << 20, Pages::Small).expect("memory");
        Home::with(memory, Options::default())
    }

    pub(crate) fn with(memory: Mapping, options: Options) -> Home {
        let host = Host::start(memory, all_kinds(), options);
        Home { host: Arc::new(host.expect("a node")) }
    }

    pub(crate) fn ask(&self, ask: Ask) -> Answer {
        self.host.ask(ask, Duration::from_secs(60)).expect("an answer")
    }

    pub(crate) fn create(&self, name: &str, mib: u64, parameters: &str) -> Store {
        self.create_of(KIND, name, mib, parameters)
    }

    pub(crate) fn create_of(&self, kind: &str, name: &str, mib: u64, parameters: &str) -> Store {
        let ask = Ask::CreateStore {
            name: name.into(),
            kind: kind.into(),
            parameters: parameters.into(),
            quota: mib << 20,
        };
        match self.ask(ask) {
            Answer::Store(store) => store,
            other => panic!("expected a store, got {other:?}"),
        }
    }

    pub(crate) fn stat(&self, name: &str) -> StoreStat {
        match self.ask(Ask::StoreStat { name: name.into() }) {
            Answer::StoreStat(stat) => stat,
            other => panic!("expected figures, got {other:?}"),
        }
    }

    /// Waits until no buffer of the store is retired, and returns the store's statistics.
    pub(crate) fn settled(&self, name: &str) -> StoreStat {
        for _ in 0..1000 {
            let stat = self.stat(name);
            if stat.retired_buffers == 0 {
                return stat;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        panic!("buffers are still retired after 5 s: {:?}", self.stat(name));
    }

    pub(crate) fn endpoint(&self) -> Rc<Count<Direct>> {
        let node: Arc<dyn LocalNode> = Arc::clone(&self.host) as _;
        Rc::new(Count::new(local::connect(&node, NodeId(0)).expect("a session")))
    }

    pub(crate) fn intercepted(&self, name: &str) -> Intercepted {
        let fabric = Rc::new(Intercept::new(self.endpoint()));
        block_on((), PrismKv::open(fabric, NodeId(0), name)).expect("the store exists")
    }

    pub(crate) fn client(&self, name: &str) -> Client {
        let endpoint = self.endpoint();
        block_on((), PrismKv::open(endpoint, NodeId(0), name)).expect("the store exists")
    }
}

/// Runs one operation to its end, then ends the endpoint's turn.
pub(crate) fn run<O>(client_endpoint: &Rc<Count<Direct>>, future: impl Future<Output = O>) -> O {
    block_on(client_endpoint.inner(), future)
}

/// Runs one operation of a client to its end.
macro_rules! go {
    ($client:expr, $op:ident ( $($arg:expr),* )) => {{
        let endpoint = std::rc::Rc::clone($client.fabric());
        $crate::support::run(&endpoint, $client.$op($($arg),*))
    }};
}
pub(crate) use go;

pub(crate) fn value_of(client: &mut Client, key: &[u8]) -> Option<Vec<u8>> {
    go!(client, get(key)).expect("a get").map(|item| item.value.to_vec())
}
