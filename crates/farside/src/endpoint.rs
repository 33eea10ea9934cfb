//! One thread's session with a node, over whichever fabric the url names.

use farside_fabrics::direct::Direct;
use farside_fabrics::executor::{Idle, Turns};
use farside_fabrics::layer::fault::FaultLine;
use farside_fabrics::memory::Mapping;
use farside_fabrics::ring::RingLine;
use farside_fabrics::session::endpoint::Endpoint as Remote;
use farside_fabrics::spin::Waiting;
use farside_fabrics::tcp::TcpLine;
#[cfg(feature = "tls")]
use farside_fabrics::tcp::tls::TlsLine;
use farside_fabrics::timer;
use farside_fabrics::udp::UdpLine;
use farside_remote::arena::session::Counters;
use farside_remote::clock::Clock;
use farside_remote::fabric::ServiceId;
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use std::sync::Arc;
use std::time::Duration;

/// A session with a node. Belongs to one thread.
#[allow(
    clippy::large_enum_variant,
    reason = "a thread has one, and the way to mapped memory is to be the shortest"
)]
pub enum Endpoint {
    /// `local` and `shm`: chains run on this thread.
    Direct(Direct),
    /// `udp`: the node's engine runs them.
    Udp(Box<Remote<UdpLine>>),
    /// `tcp`: the node's engine runs them.
    Tcp(Box<Remote<TcpLine>>),
    /// `tls`: the node's engine runs them.
    #[cfg(feature = "tls")]
    Tls(Box<Remote<TlsLine>>),
    /// `ring`: the node's engine runs them.
    Ring(Box<Remote<RingLine>>),
    /// `udp` with faults.
    FaultyUdp(Box<Remote<FaultLine<UdpLine>>>),
    /// `tcp` with faults.
    FaultyTcp(Box<Remote<FaultLine<TcpLine>>>),
    /// `tls` with faults.
    #[cfg(feature = "tls")]
    FaultyTls(Box<Remote<FaultLine<TlsLine>>>),
}

/// The same of whichever it is.
macro_rules! either {
    ($endpoint:expr, $inner:ident => $then:expr) => {
        match $endpoint {
            Endpoint::Direct($inner) => $then,
            Endpoint::Udp($inner) => $then,
            Endpoint::Tcp($inner) => $then,
            #[cfg(feature = "tls")]
            Endpoint::Tls($inner) => $then,
            Endpoint::Ring($inner) => $then,
            Endpoint::FaultyUdp($inner) => $then,
            Endpoint::FaultyTcp($inner) => $then,
            #[cfg(feature = "tls")]
            Endpoint::FaultyTls($inner) => $then,
        }
    };
}

impl Endpoint {
    /// Sets how long the answer to a call may take.
    pub fn set_patience(&self, patience: Duration) {
        either!(self, endpoint => endpoint.set_patience(patience));
    }

    /// Sets how it waits for an engine's answers. Where chains run on this thread there are none.
    pub fn set_waiting(&self, waiting: Waiting) {
        match self {
            Endpoint::Direct(_) => {}
            Endpoint::Udp(endpoint) => endpoint.set_waiting(waiting),
            Endpoint::Tcp(endpoint) => endpoint.set_waiting(waiting),
            #[cfg(feature = "tls")]
            Endpoint::Tls(endpoint) => endpoint.set_waiting(waiting),
            Endpoint::Ring(endpoint) => endpoint.set_waiting(waiting),
            Endpoint::FaultyUdp(endpoint) => endpoint.set_waiting(waiting),
            Endpoint::FaultyTcp(endpoint) => endpoint.set_waiting(waiting),
            #[cfg(feature = "tls")]
            Endpoint::FaultyTls(endpoint) => endpoint.set_waiting(waiting),
        }
    }

    /// What this session has counted.
    pub fn counters(&self) -> Counters {
        either!(self, endpoint => endpoint.counters())
    }

    /// The node's memory, where it is mapped here.
    pub fn memory(&self) -> Option<&Arc<Mapping>> {
        match self {
            Endpoint::Direct(direct) => Some(direct.memory()),
            _ => None,
        }
    }

    /// Keeps the session going under an executor that is not ours: spawn it on the same thread, and let it run for as
    /// long as the endpoint is used. Never completes.
    pub async fn drive(&self) {
        either!(self, endpoint => endpoint.drive().await);
    }
}

impl Fabric for Endpoint {
    #[inline]
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        either!(self, endpoint => endpoint.run(node, chain, reply).await)
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        either!(self, endpoint => endpoint.call(node, service, request, answer).await)
    }

    #[inline]
    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        either!(self, endpoint => endpoint.retire(node, key, buffer));
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        either!(self, endpoint => endpoint.capabilities(node))
    }
}

impl Turns for Endpoint {
    #[inline]
    fn end_turn(&self) {
        either!(self, endpoint => endpoint.end_turn());
    }

    fn wait(&self, core: &Idle<'_>) {
        either!(self, endpoint => endpoint.wait(core));
    }
}

impl Clock for Endpoint {
    fn now(&self) -> Duration {
        timer::now()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        timer::sleep(duration)
    }
}
