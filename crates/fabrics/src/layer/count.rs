//! Counts the cost of an operation, so that a test can compare it with the paper.
//!
//! Invariant: a round trip begins when a request is sent while none is outstanding. So an operation has as many round
//! trips as it sends groups of concurrent requests, one group after the other.

use farside_remote::fabric::ServiceId;
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use std::cell::Cell;

/// Costs of the requests to a fabric: their number and their sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Costs {
    /// Number of round trips. Requests that are outstanding together share one.
    pub round_trips: u64,
    /// Number of chains.
    pub requests: u64,
    /// Number of calls.
    pub calls: u64,
    /// Bytes of chains and call requests on the wire.
    pub bytes_out: u64,
    /// Bytes of replies and call responses on the wire.
    pub bytes_in: u64,
    /// Number of CAS and FETCH-ADD operations.
    pub atomics: u64,
    /// Number of buffers retired by this end: by chains that the caller's CPU runs, and because a future was dropped.
    /// Excludes those retired by an engine.
    pub retired: u64,
}

/// A fabric that counts requests.
pub struct Count<F> {
    inner: F,
    costs: Cell<Costs>,
    outstanding: Cell<u64>,
}

impl<F> Count<F> {
    /// Counts the requests to `inner`.
    pub fn new(inner: F) -> Count<F> {
        Count { inner, costs: Cell::default(), outstanding: Cell::new(0) }
    }

    /// Returns the costs since the previous call, or since creation.
    pub fn take(&self) -> Costs {
        self.costs.take()
    }

    /// Returns the wrapped fabric.
    pub fn inner(&self) -> &F {
        &self.inner
    }

    fn change(&self, change: impl FnOnce(&mut Costs)) {
        let mut costs = self.costs.get();
        change(&mut costs);
        self.costs.set(costs);
    }

    fn ask(&self) -> Outstanding<'_> {
        if self.outstanding.get() == 0 {
            self.change(|costs| costs.round_trips += 1);
        }
        self.outstanding.set(self.outstanding.get() + 1);
        Outstanding(&self.outstanding)
    }
}

/// Guard of an outstanding request. Dropping it ends the request, also if the request's future was dropped.
struct Outstanding<'a>(&'a Cell<u64>);

impl Drop for Outstanding<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl<F: Fabric> Fabric for Count<F> {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        let _asked = self.ask();
        let view = chain.view();
        self.change(|costs| {
            costs.requests += 1;
            costs.bytes_out += view.wire_len() as u64;
            costs.atomics += view.atomics() as u64;
        });
        self.inner.run(node, chain, reply).await?;
        self.change(|costs| {
            costs.bytes_in += reply.as_bytes().len() as u64;
            costs.retired += u64::from(reply.retired());
        });
        Ok(())
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        let _asked = self.ask();
        self.change(|costs| {
            costs.calls += 1;
            costs.bytes_out += request.len() as u64;
        });
        self.inner.call(node, service, request, answer).await?;
        self.change(|costs| costs.bytes_in += answer.len() as u64);
        Ok(())
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.change(|costs| costs.retired += 1);
        self.inner.retire(node, key, buffer);
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.inner.capabilities(node)
    }

    fn session_number(&self, node: NodeId) -> u64 {
        self.inner.session_number(node)
    }

    fn may_run_abandoned(&self, node: NodeId) -> bool {
        self.inner.may_run_abandoned(node)
    }
}

turns_and_time_of_inner!(Count<F>);
