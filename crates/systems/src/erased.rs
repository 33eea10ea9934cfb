//! A fabric whose type is erased, for work that is rare and is done by every system.
//!
//! Generic code is compiled once for each fabric. What a client runs all the time is worth that. Recovery is not: it
//! would be most of what is compiled for a fabric over which only [`heal`](crate::heal::heal) is called.

use farside_remote::clock::Clock;
use farside_remote::fabric::ServiceId;
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use std::pin::Pin;
use std::time::Duration;

type Boxed<'f, O> = Pin<Box<dyn Future<Output = O> + 'f>>;

/// A reference to a fabric of any type.
#[derive(Clone, Copy)]
pub(crate) struct Erased<'a>(&'a dyn Requests);

impl<'a> Erased<'a> {
    pub(crate) fn of(fabric: &'a (impl Fabric + Clock)) -> Erased<'a> {
        Erased(fabric)
    }
}

/// [`Fabric`] and [`Clock`] with futures whose types are erased.
trait Requests {
    fn run<'f>(
        &'f self,
        node: NodeId,
        chain: &'f Chain<'_>,
        reply: &'f mut Reply,
    ) -> Boxed<'f, Result<(), FabricError>>;

    fn call<'f>(
        &'f self,
        node: NodeId,
        service: ServiceId,
        request: &'f [u8],
        answer: &'f mut Vec<u8>,
    ) -> Boxed<'f, Result<(), FabricError>>;

    fn retire(&self, node: NodeId, key: Key, buffer: Addr);
    fn capabilities(&self, node: NodeId) -> Capabilities;
    fn session_number(&self, node: NodeId) -> u64;
    fn may_run_abandoned(&self, node: NodeId) -> bool;
    fn now(&self) -> Duration;
    fn wall(&self) -> Duration;
    fn sleep(&self, duration: Duration) -> Boxed<'_, ()>;
}

impl<F: Fabric + Clock> Requests for F {
    fn run<'f>(
        &'f self,
        node: NodeId,
        chain: &'f Chain<'_>,
        reply: &'f mut Reply,
    ) -> Boxed<'f, Result<(), FabricError>> {
        Box::pin(Fabric::run(self, node, chain, reply))
    }

    fn call<'f>(
        &'f self,
        node: NodeId,
        service: ServiceId,
        request: &'f [u8],
        answer: &'f mut Vec<u8>,
    ) -> Boxed<'f, Result<(), FabricError>> {
        Box::pin(Fabric::call(self, node, service, request, answer))
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        Fabric::retire(self, node, key, buffer);
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        Fabric::capabilities(self, node)
    }

    fn session_number(&self, node: NodeId) -> u64 {
        Fabric::session_number(self, node)
    }

    fn may_run_abandoned(&self, node: NodeId) -> bool {
        Fabric::may_run_abandoned(self, node)
    }

    fn now(&self) -> Duration {
        Clock::now(self)
    }

    fn wall(&self) -> Duration {
        Clock::wall(self)
    }

    fn sleep(&self, duration: Duration) -> Boxed<'_, ()> {
        Box::pin(Clock::sleep(self, duration))
    }
}

impl Fabric for Erased<'_> {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        self.0.run(node, chain, reply).await
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        self.0.call(node, service, request, answer).await
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.0.retire(node, key, buffer);
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.0.capabilities(node)
    }

    fn session_number(&self, node: NodeId) -> u64 {
        self.0.session_number(node)
    }

    fn may_run_abandoned(&self, node: NodeId) -> bool {
        self.0.may_run_abandoned(node)
    }
}

impl Clock for Erased<'_> {
    fn now(&self) -> Duration {
        self.0.now()
    }

    fn wall(&self) -> Duration {
        self.0.wall()
    }

    async fn sleep(&self, duration: Duration) {
        self.0.sleep(duration).await;
    }
}
