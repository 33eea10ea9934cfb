//! A client's machine whose threads share one client of a system, each over its own connections.
//!
//! A thread has one connection to each node. The fabric does not know which thread runs a chain, so it takes the one of
//! the node's connections that has the fewest chains in flight: two chains share a connection only if all connections
//! are in use.
//!
//! To prepare a measurement, a machine can run its chains *at once*: each takes effect and is answered at the instant
//! at which it is run, without a message. This leaves the same bytes behind, and takes a fraction of the events.

use super::Client;
use farside_remote::clock::Clock;
use farside_remote::fabric::ServiceId;
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use std::cell::Cell;
use std::time::Duration;

/// Connections of a machine's threads to all nodes.
pub struct Threads {
    /// The connections to each node, one for each thread.
    nodes: Box<[Box<[Line]>]>,
    /// Number of threads that send.
    active: Cell<usize>,
    /// Whether chains are run at once.
    at_once: Cell<bool>,
    /// Number of ops of the chains that were run at once.
    ops_at_once: Cell<u64>,
}

struct Line {
    client: Client,
    in_flight: Cell<u32>,
}

/// A chain in flight.
struct Passage<'a>(&'a Line);

impl Drop for Passage<'_> {
    fn drop(&mut self) {
        self.0.in_flight.set(self.0.in_flight.get() - 1);
    }
}

impl Threads {
    /// Creates the threads from the connections to each node, one for each thread. All threads send.
    pub(super) fn new(nodes: impl Iterator<Item = Vec<Client>>) -> Threads {
        let lines = |clients: Vec<Client>| {
            clients.into_iter().map(|client| Line { client, in_flight: Cell::new(0) }).collect()
        };
        let nodes: Box<[Box<[Line]>]> = nodes.map(lines).collect();
        let active = Cell::new(nodes[0].len());
        Threads { nodes, active, at_once: Cell::new(false), ops_at_once: Cell::new(0) }
    }

    /// Sets whether chains are run at once from now on. No chain may be in flight.
    pub fn run_at_once(&self, at_once: bool) {
        self.at_once.set(at_once);
    }

    /// Number of ops of the chains that were run at once so far.
    pub fn ops_at_once(&self) -> u64 {
        self.ops_at_once.get()
    }

    /// Sets the number of threads that send from now on.
    ///
    /// # Panics
    /// If it is 0, or larger than the number of threads.
    pub fn activate(&self, threads: usize) {
        assert!((1..=self.nodes[0].len()).contains(&threads), "the machine has no {threads} threads");
        self.active.set(threads);
    }

    fn lines(&self, node: NodeId) -> Result<&[Line], FabricError> {
        let lines = self.nodes.get(node.0 as usize).ok_or(FabricError::NoSuchNode(node))?;
        Ok(&lines[..self.active.get()])
    }

    fn first(&self) -> &Client {
        &self.nodes[0][0].client
    }
}

impl Fabric for Threads {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        let lines = self.lines(node)?;
        if self.at_once.get() {
            self.ops_at_once.set(self.ops_at_once.get() + chain.view().len() as u64);
            return lines[0].client.run_at_once(node, chain, reply);
        }
        let line = lines.iter().min_by_key(|line| line.in_flight.get()).expect("a machine has a thread");
        line.in_flight.set(line.in_flight.get() + 1);
        let _passage = Passage(line);
        line.client.run(node, chain, reply).await
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        self.lines(node)?[0].client.call(node, service, request, answer).await
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        if let Ok(lines) = self.lines(node) {
            lines[0].client.retire(node, key, buffer);
        }
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.lines(node).map_or(Capabilities::NONE, |lines| lines[0].client.capabilities(node))
    }
}

impl Clock for Threads {
    fn now(&self) -> Duration {
        self.first().now()
    }

    fn wall(&self) -> Duration {
        self.first().wall()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        self.first().sleep(duration)
    }
}
