//! Fabrics in virtual time.
//!
//! - [`direct`]: the client's CPU runs the chain on the node's memory, as over `shm`.
//! - [`session`]: the node's engine runs the chain. The request uses a datagram session, as over `udp`, `tcp` and
//!   `ring`.
//! - [`verbs`]: the node's NIC executes the ops of a chain, with the guarantees of one-sided RDMA; the engine serves
//!   calls.
//! - [`hardware`]: a NIC or CPU of the papers' testbeds runs the chain, with the papers' latencies.

pub mod direct;
pub mod hardware;
pub mod session;
pub mod verbs;

use crate::clock::ProcessClock;
use farside_remote::clock::Clock;
use farside_remote::fabric::ServiceId;
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use std::rc::Rc;
use std::time::Duration;

/// A client's endpoint of a simulated fabric that is selected at run time.
#[derive(Clone)]
pub enum AnyFabric {
    /// The client's CPU runs the chains; see [`direct`].
    Direct(Rc<direct::Direct>),
    /// The node's engine runs the chains; see [`session`].
    Session(Rc<session::Endpoint>),
    /// The node's NIC executes the chains; see [`verbs`].
    Verbs(Rc<verbs::Verbs>),
}

impl AnyFabric {
    /// Clock of the client's process.
    pub fn clock(&self) -> &ProcessClock {
        match self {
            AnyFabric::Direct(direct) => direct.clock(),
            AnyFabric::Session(endpoint) => endpoint.clock(),
            AnyFabric::Verbs(verbs) => verbs.clock(),
        }
    }

    /// Whether the session is over: all further requests fail.
    pub fn is_over(&self) -> bool {
        match self {
            AnyFabric::Direct(direct) => direct.is_over(),
            AnyFabric::Session(endpoint) => endpoint.is_over(),
            AnyFabric::Verbs(verbs) => verbs.is_over(),
        }
    }

    /// Whether both are the same session.
    pub fn is_same(&self, other: &AnyFabric) -> bool {
        match (self, other) {
            (AnyFabric::Direct(one), AnyFabric::Direct(other)) => Rc::ptr_eq(one, other),
            (AnyFabric::Session(one), AnyFabric::Session(other)) => Rc::ptr_eq(one, other),
            (AnyFabric::Verbs(one), AnyFabric::Verbs(other)) => Rc::ptr_eq(one, other),
            _ => false,
        }
    }

    /// Waits until all retired buffers have reached the node, then closes the session.
    pub async fn close(&self) {
        match self {
            AnyFabric::Direct(direct) => direct.close().await,
            AnyFabric::Session(endpoint) => endpoint.close().await,
            AnyFabric::Verbs(verbs) => verbs.close().await,
        }
    }
}

impl Fabric for AnyFabric {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        match self {
            AnyFabric::Direct(direct) => direct.run(node, chain, reply).await,
            AnyFabric::Session(endpoint) => endpoint.run(node, chain, reply).await,
            AnyFabric::Verbs(verbs) => verbs.run(node, chain, reply).await,
        }
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        match self {
            AnyFabric::Direct(direct) => direct.call(node, service, request, answer).await,
            AnyFabric::Session(endpoint) => endpoint.call(node, service, request, answer).await,
            AnyFabric::Verbs(verbs) => verbs.call(node, service, request, answer).await,
        }
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        match self {
            AnyFabric::Direct(direct) => direct.retire(node, key, buffer),
            AnyFabric::Session(endpoint) => endpoint.retire(node, key, buffer),
            AnyFabric::Verbs(verbs) => verbs.retire(node, key, buffer),
        }
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        match self {
            AnyFabric::Direct(direct) => direct.capabilities(node),
            AnyFabric::Session(endpoint) => endpoint.capabilities(node),
            AnyFabric::Verbs(verbs) => verbs.capabilities(node),
        }
    }

    fn may_run_abandoned(&self, node: NodeId) -> bool {
        match self {
            AnyFabric::Direct(direct) => direct.may_run_abandoned(node),
            AnyFabric::Session(endpoint) => endpoint.may_run_abandoned(node),
            AnyFabric::Verbs(verbs) => verbs.may_run_abandoned(node),
        }
    }
}

impl Clock for AnyFabric {
    fn now(&self) -> Duration {
        self.clock().now()
    }

    fn wall(&self) -> Duration {
        self.clock().wall()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        self.clock().sleep(duration)
    }
}
