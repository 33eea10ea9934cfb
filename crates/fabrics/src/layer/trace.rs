//! Prints the requests to a fabric in words, for people who want to see a protocol at work.
//!
//! Invariant: each request is printed once, with its duration, when its outcome is known.

use farside_remote::clock::Clock;
use farside_remote::fabric::ServiceId;
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};

/// A fabric that passes a description of each request to `tell`: one or more lines, without a final line end.
pub struct Trace<F, T> {
    inner: F,
    tell: T,
}

impl<F, T: Fn(&str)> Trace<F, T> {
    /// Traces the requests to `inner`.
    pub fn new(inner: F, tell: T) -> Trace<F, T> {
        Trace { inner, tell }
    }

    /// Returns the wrapped fabric.
    pub fn inner(&self) -> &F {
        &self.inner
    }
}

impl<F: Fabric + Clock, T: Fn(&str)> Fabric for Trace<F, T> {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        let since = self.inner.now();
        let ran = self.inner.run(node, chain, reply).await;
        let took = self.inner.now().saturating_sub(since);
        let view = chain.view();
        let mut text = format!("chain of {} bytes to node {}, {took:?}", view.wire_len(), node.0);
        match &ran {
            Err(error) => text.push_str(&format!(": {error}")),
            Ok(()) => {
                for (index, (op, status)) in view.ops().zip(reply.statuses()).enumerate() {
                    let out = reply.output(index).len();
                    text.push_str(&format!("\n  {op}: {status}"));
                    if out > 0 {
                        text.push_str(&format!(", {out} bytes"));
                    }
                }
            }
        }
        (self.tell)(&text);
        ran
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        let since = self.inner.now();
        let called = self.inner.call(node, service, request, answer).await;
        let took = self.inner.now().saturating_sub(since);
        let outcome = match &called {
            Ok(()) => format!("{} bytes", answer.len()),
            Err(error) => error.to_string(),
        };
        (self.tell)(&format!(
            "call of service {} at node {}, {} bytes, {took:?}: {outcome}",
            service.0,
            node.0,
            request.len()
        ));
        called
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        (self.tell)(&format!("retire {buffer:?} at node {}", node.0));
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

turns_and_time_of_inner!(Trace<F, T>);
