//! Three nodes that listen on TCP, and clients of all of them, whose requests are counted.

use farside_fabrics::executor::block_on;
use farside_fabrics::layer::count::Count;
use farside_fabrics::memory::{Mapping, Pages};
use farside_fabrics::nodes::Nodes;
use farside_fabrics::session::client::Config;
use farside_fabrics::session::endpoint::Endpoint;
use farside_fabrics::tcp::TcpLine;
use farside_node::host::{Host, Listen, Options as HostOptions};
use farside_remote::NodeId;
use farside_systems::members::{self, New};
use farside_systems::registry::all_kinds;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of nodes.
pub(crate) const NODES: usize = 3;

pub(crate) type Fabric = Rc<Count<Rc<Nodes<Endpoint<TcpLine>>>>>;

/// Three nodes at ports of this host.
pub(crate) struct Pool {
    pub(crate) hosts: Vec<Option<Host>>,
    pub(crate) ports: [SocketAddr; NODES],
}

pub(crate) fn serve(at: SocketAddr) -> Host {
    let options = HostOptions { listen: vec![Listen::Tcp(at)], ..HostOptions::default() };
    Host::start(Mapping::create(32 << 20, Pages::Small).expect("memory"), all_kinds(), options)
        .expect("a node")
}

fn port_of(host: &Host) -> SocketAddr {
    let Listen::Tcp(address) = host.listening()[0] else { panic!("it listens on TCP") };
    address
}

fn connect(port: SocketAddr, node: NodeId) -> Result<Endpoint<TcpLine>, String> {
    static CLIENTS: AtomicU64 = AtomicU64::new(1 << 33);
    let identity = CLIENTS.fetch_add(1, Ordering::Relaxed);
    let config = Config { identity: identity.into(), incarnation: 1, nonce: identity, ..Config::default() };
    let line = TcpLine::connect(port).map_err(|error| error.to_string())?;
    Endpoint::open(line, node, config).map_err(|error| error.to_string())
}

impl Pool {
    pub(crate) fn start() -> Pool {
        let hosts = [(); NODES].map(|()| serve((Ipv4Addr::LOCALHOST, 0).into()));
        let ports = hosts.each_ref().map(port_of);
        Pool { hosts: hosts.into_iter().map(Some).collect(), ports }
    }

    /// Opens sessions with all nodes. The node with number `n` is the node `order[n]` of the pool.
    pub(crate) fn fabric(&self, order: [usize; NODES]) -> Fabric {
        let ports = order.map(|node| self.ports[node]);
        let open = move |node: NodeId| connect(ports[node.0 as usize], node);
        Rc::new(Count::new(Rc::new(Nodes::open(NODES, Arc::new(open)))))
    }

    /// Creates a store. Returns the sessions that created it.
    pub(crate) fn create(&self, new: &New) -> Fabric {
        let fabric = self.fabric([0, 1, 2]);
        let created = run(&fabric, members::create(&fabric, NODES as u32, new, [1, 2]));
        assert_eq!(created.expect("the nodes have memory").len(), new.members);
        fabric
    }
}

pub(crate) fn run<O>(fabric: &Fabric, future: impl Future<Output = O>) -> O {
    block_on(&**fabric.inner(), future)
}
