//! One thread's sessions with the nodes of a pool, each over the fabric that its node's url names.
//!
//! Invariant: a pool of one node is reached without the bookkeeping for several.

use farside_fabrics::direct::Direct;
use farside_fabrics::executor::{self, Idle, Turns};
use farside_fabrics::layer::fault::FaultLine;
use farside_fabrics::memory::Mapping;
use farside_fabrics::nodes::{self, Nodes};
use farside_fabrics::ring::RingLine;
use farside_fabrics::session::endpoint::Endpoint as Remote;
use farside_fabrics::spin::Waiting;
use farside_fabrics::tcp::TcpLine;
#[cfg(feature = "tls")]
use farside_fabrics::tcp::tls::TlsLine;
use farside_fabrics::timer;
use farside_fabrics::udp::UdpLine;
#[cfg(feature = "verbs")]
use farside_fabrics::verbs;
use farside_fabrics::wait::{Waits, Wakeup};
use farside_remote::arena::session::Counters;
use farside_remote::clock::Clock;
use farside_remote::fabric::ServiceId;
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

/// Sessions with all nodes of a pool. Belongs to one thread.
#[allow(
    clippy::large_enum_variant,
    reason = "a thread has one, and mapped memory must be reached without an indirection"
)]
pub enum Endpoint {
    /// The session with the only node of the pool, [`NodeId`] 0.
    One(Session),
    /// Sessions with several nodes. A session that is over is opened again in the background.
    Many(Box<Nodes<Session>>),
}

/// Evaluates `$then` for the endpoint's variant, with `$inner` bound to the variant's content.
macro_rules! with_endpoint {
    ($endpoint:expr, $inner:ident => $then:expr) => {
        match $endpoint {
            Endpoint::One($inner) => $then,
            Endpoint::Many($inner) => $then,
        }
    };
}

impl Endpoint {
    /// Number of nodes in the pool. Their [`NodeId`]s begin with 0.
    pub fn nodes(&self) -> u32 {
        match self {
            Endpoint::One(_) => 1,
            Endpoint::Many(nodes) => nodes.count(),
        }
    }

    /// Sets the time after which a call without a response times out.
    pub fn set_call_timeout(&self, patience: Duration) {
        match self {
            Endpoint::One(session) => nodes::Session::set_call_timeout(session, patience),
            Endpoint::Many(nodes) => nodes.set_call_timeout(patience),
        }
    }

    /// Sets how the endpoint waits for the responses of engines. Has no effect on a pool of one node at `local` or
    /// `shm`, which has no engine.
    pub fn set_waiting(&self, waiting: Waiting) {
        with_endpoint!(self, endpoint => endpoint.set_waiting(waiting));
    }

    /// Returns the counters of all sessions.
    pub fn counters(&self) -> Counters {
        match self {
            Endpoint::One(session) => nodes::Session::counters(session),
            Endpoint::Many(nodes) => nodes.counters(),
        }
    }

    /// Returns the memory of the only node if this process has mapped it, as over `local` and `shm`.
    pub fn memory(&self) -> Option<&Arc<Mapping>> {
        match self {
            Endpoint::One(Session::Direct(direct)) => Some(direct.memory()),
            _ => None,
        }
    }

    /// Drives the sessions under an executor that is not Farside's. The caller spawns the returned future on the
    /// endpoint's thread and keeps it running as long as the endpoint is used. The future never completes.
    pub async fn drive(&self) {
        match self {
            Endpoint::One(session) => nodes::Session::drive(session).await,
            Endpoint::Many(nodes) => nodes.drive().await,
        }
    }

    /// Runs a chain by the session's own future, or by that of several nodes.
    async fn run_elsewhere(
        &self,
        node: NodeId,
        chain: &Chain<'_>,
        reply: &mut Reply,
    ) -> Result<(), FabricError> {
        with_endpoint!(self, endpoint => endpoint.run(node, chain, reply).await)
    }
}

impl Fabric for Endpoint {
    #[inline]
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        match self {
            // In parts, so that mapped memory is reached without a call.
            Endpoint::One(Session::Direct(direct)) => {
                if executor::in_company() {
                    let hints = direct.expect(chain);
                    executor::yield_now().await;
                    direct.proceed(hints);
                }
                direct.run_now(node, chain, reply)
            }
            // One future for all others. With two, the compiler does not inline the drop of this future, and each chain
            // on mapped memory makes a call for it.
            elsewhere => elsewhere.run_elsewhere(node, chain, reply).await,
        }
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

    #[inline]
    fn session_number(&self, node: NodeId) -> u64 {
        with_endpoint!(self, endpoint => endpoint.session_number(node))
    }

    fn may_run_abandoned(&self, node: NodeId) -> bool {
        with_endpoint!(self, endpoint => endpoint.may_run_abandoned(node))
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

    fn wall(&self) -> Duration {
        timer::wall()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        timer::sleep(duration)
    }
}

/// A session with one node, over any fabric. Belongs to one thread.
#[allow(
    clippy::large_enum_variant,
    reason = "a thread has one, and mapped memory must be reached without an indirection"
)]
pub enum Session {
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
    /// `verbs`: NICs run the chains that they can, and the node's engine the others.
    #[cfg(feature = "verbs")]
    Verbs(Box<verbs::Endpoint>),
    /// `udp` with injected faults.
    FaultyUdp(Box<Remote<FaultLine<UdpLine>>>),
    /// `tcp` with injected faults.
    FaultyTcp(Box<Remote<FaultLine<TcpLine>>>),
    /// `tls` with injected faults.
    #[cfg(feature = "tls")]
    FaultyTls(Box<Remote<FaultLine<TlsLine>>>),
}

/// Evaluates `$then` for the session's variant, with `$inner` bound to the variant's content.
macro_rules! with_session {
    ($session:expr, $inner:ident => $then:expr) => {
        match $session {
            Session::Direct($inner) => $then,
            Session::Udp($inner) => $then,
            Session::Tcp($inner) => $then,
            #[cfg(feature = "tls")]
            Session::Tls($inner) => $then,
            Session::Ring($inner) => $then,
            #[cfg(feature = "verbs")]
            Session::Verbs($inner) => $then,
            Session::FaultyUdp($inner) => $then,
            Session::FaultyTcp($inner) => $then,
            #[cfg(feature = "tls")]
            Session::FaultyTls($inner) => $then,
        }
    };
}

impl Session {
    /// Sets how the session waits for an engine's responses. Has no effect on `local` and `shm`, which have no engine.
    fn set_waiting(&self, waiting: Waiting) {
        match self {
            Session::Direct(_) => {}
            Session::Udp(endpoint) => endpoint.set_waiting(waiting),
            Session::Tcp(endpoint) => endpoint.set_waiting(waiting),
            #[cfg(feature = "tls")]
            Session::Tls(endpoint) => endpoint.set_waiting(waiting),
            Session::Ring(endpoint) => endpoint.set_waiting(waiting),
            #[cfg(feature = "verbs")]
            Session::Verbs(endpoint) => endpoint.set_waiting(waiting),
            Session::FaultyUdp(endpoint) => endpoint.set_waiting(waiting),
            Session::FaultyTcp(endpoint) => endpoint.set_waiting(waiting),
            #[cfg(feature = "tls")]
            Session::FaultyTls(endpoint) => endpoint.set_waiting(waiting),
        }
    }
}

impl Fabric for Session {
    #[inline]
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        with_session!(self, inner => inner.run(node, chain, reply).await)
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        with_session!(self, inner => inner.call(node, service, request, answer).await)
    }

    #[inline]
    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        with_session!(self, inner => inner.retire(node, key, buffer));
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        with_session!(self, inner => inner.capabilities(node))
    }

    fn may_run_abandoned(&self, node: NodeId) -> bool {
        with_session!(self, inner => inner.may_run_abandoned(node))
    }
}

impl Turns for Session {
    #[inline]
    fn end_turn(&self) {
        with_session!(self, inner => inner.end_turn());
    }

    fn wait(&self, core: &Idle<'_>) {
        with_session!(self, inner => inner.wait(core));
    }
}

impl Waits for Session {
    fn begin_wait(&self) {
        with_session!(self, inner => inner.begin_wait());
    }

    fn is_waiting(&self) -> bool {
        with_session!(self, inner => inner.is_waiting())
    }

    fn poll(&self) -> bool {
        with_session!(self, inner => inner.poll())
    }

    fn end_wait(&self, wakeup: Wakeup) {
        with_session!(self, inner => inner.end_wait(wakeup));
    }

    fn may_sleep(&self) -> bool {
        with_session!(self, inner => inner.may_sleep())
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        with_session!(self, inner => inner.fd())
    }

    fn sleep_max(&self, now: Duration) -> Option<Duration> {
        with_session!(self, inner => inner.sleep_max(now))
    }
}

impl nodes::Session for Session {
    fn is_over(&self) -> bool {
        with_session!(self, inner => inner.is_over())
    }

    fn set_call_timeout(&self, patience: Duration) {
        with_session!(self, inner => inner.set_call_timeout(patience));
    }

    fn counters(&self) -> Counters {
        with_session!(self, inner => inner.counters())
    }

    async fn drive(&self) {
        with_session!(self, inner => inner.drive().await);
    }
}
