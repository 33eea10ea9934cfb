//! One thread's session with a node, over the fabric that the url names.

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

/// A session with a node, over any fabric. Belongs to one thread.
#[allow(
    clippy::large_enum_variant,
    reason = "a thread has one, and mapped memory must be reached without an indirection"
)]
pub enum Endpoint {
    /// `local` and `shm`: this thread runs the chains.
    Direct(Direct),
    /// `udp`: the node's engine runs the chains.
    Udp(Box<Remote<UdpLine>>),
    /// `tcp`: the node's engine runs the chains.
    Tcp(Box<Remote<TcpLine>>),
    /// `tls`: the node's engine runs the chains.
    #[cfg(feature = "tls")]
    Tls(Box<Remote<TlsLine>>),
    /// `ring`: the node's engine runs the chains.
    Ring(Box<Remote<RingLine>>),
    /// `udp` with injected faults.
    FaultyUdp(Box<Remote<FaultLine<UdpLine>>>),
    /// `tcp` with injected faults.
    FaultyTcp(Box<Remote<FaultLine<TcpLine>>>),
    /// `tls` with injected faults.
    #[cfg(feature = "tls")]
    FaultyTls(Box<Remote<FaultLine<TlsLine>>>),
}

/// Evaluates `$then` for the endpoint's variant, with `$inner` bound to the variant's content.
macro_rules! with_endpoint {
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
    /// Sets the time after which a call without a response times out.
    pub fn set_call_timeout(&self, patience: Duration) {
        with_endpoint!(self, endpoint => endpoint.set_call_timeout(patience));
    }

    /// Sets how the endpoint waits for an engine's responses. Has no effect on `local` and `shm`, which have no engine.
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

    /// Returns this session's counters.
    pub fn counters(&self) -> Counters {
        with_endpoint!(self, endpoint => endpoint.counters())
    }

    /// Returns the node's memory if this process has mapped it, as over `local` and `shm`.
    pub fn memory(&self) -> Option<&Arc<Mapping>> {
        match self {
            Endpoint::Direct(direct) => Some(direct.memory()),
            _ => None,
        }
    }

    /// Drives the session under an executor that is not Farside's. The caller spawns the returned future on the
    /// endpoint's thread and keeps it running as long as the endpoint is used. The future never completes.
    pub async fn drive(&self) {
        with_endpoint!(self, endpoint => endpoint.drive().await);
    }
}

impl Fabric for Endpoint {
    #[inline]
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        with_endpoint!(self, endpoint => endpoint.run(node, chain, reply).await)
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        with_endpoint!(self, endpoint => endpoint.call(node, service, request, answer).await)
    }

    #[inline]
    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        with_endpoint!(self, endpoint => endpoint.retire(node, key, buffer));
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        with_endpoint!(self, endpoint => endpoint.capabilities(node))
    }
}

impl Turns for Endpoint {
    #[inline]
    fn end_turn(&self) {
        with_endpoint!(self, endpoint => endpoint.end_turn());
    }

    fn wait(&self, core: &Idle<'_>) {
        with_endpoint!(self, endpoint => endpoint.wait(core));
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
