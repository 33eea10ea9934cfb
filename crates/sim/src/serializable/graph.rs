//! A graph of transactions, its strongly connected components, and short cycles.
//!
//! Besides the transactions, a graph has auxiliary nodes, from which only edges of the kind [`Why::Pass`] lead on. An
//! edge to an auxiliary node stands for edges of its kind to all transactions that are reached from there. So the
//! number of edges stays linear.
//!
//! Invariant: searches depend only on the order of the edges, so a verdict is the same in every build.

use std::collections::VecDeque;

/// Why a transaction comes before another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Why {
    /// The other one wrote a later version of a key.
    Ww,
    /// The other one read its write.
    Wr,
    /// The other one wrote the version after the one that it read.
    Rw,
    /// The other one was called after its return.
    RealTime,
    /// The edge leads on from an auxiliary node.
    Pass,
}

/// An edge. `key` means nothing for [`Why::RealTime`] and [`Why::Pass`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Edge {
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) why: Why,
    pub(super) key: u64,
}

/// Largest number of edges, or nodes, from which a search for a short cycle begins.
const STARTS_MAX: usize = 128;

pub(super) struct Graph {
    /// The edges, by the node that they leave.
    edges: Vec<Edge>,
    /// For each node, the index of its first edge; and the number of edges.
    first: Vec<usize>,
}

impl Graph {
    pub(super) fn new(nodes: usize, mut edges: Vec<Edge>) -> Graph {
        edges.sort_by_key(|edge| edge.from);
        let mut first = vec![0; nodes + 1];
        edges.iter().for_each(|edge| first[edge.from as usize + 1] += 1);
        (0..nodes).for_each(|node| first[node + 1] += first[node]);
        Graph { edges, first }
    }

    /// Whether the edges of these kinds have a cycle.
    pub(super) fn has_cycle(&self, kinds: &[Why]) -> bool {
        self.smallest_component(kinds).is_some()
    }

    /// Returns a short cycle of edges of these kinds, without the auxiliary nodes. If it must contain a [`Why::Rw`], it
    /// has as few of them as the search can find.
    pub(super) fn cycle(&self, kinds: &[Why]) -> Option<Vec<Edge>> {
        let component = self.smallest_component(kinds)?;
        let is_in = Within::new(self.first.len() - 1, &component);
        let others: Vec<Why> = kinds.iter().copied().filter(|why| *why != Why::Rw).collect();
        let missed = component.iter().flat_map(|node| self.edges_from(*node));
        let missed =
            missed.filter(|edge| edge.why == Why::Rw && kinds.contains(&Why::Rw) && is_in.has(edge.to));
        let with_one = missed.take(STARTS_MAX).filter_map(|edge| {
            let mut path = self.path(edge.to, edge.from, &others, &is_in)?;
            path.insert(0, *edge);
            Some(path)
        });
        let shortest = with_one.min_by_key(|path| length(path)).or_else(|| {
            let starts = component.iter().take(STARTS_MAX);
            starts.filter_map(|node| self.path(*node, *node, kinds, &is_in)).min_by_key(|path| length(path))
        });
        shortest.map(|path| without_auxiliary(&path))
    }

    fn edges_from(&self, node: u32) -> &[Edge] {
        &self.edges[self.first[node as usize]..self.first[node as usize + 1]]
    }

    /// Returns the smallest strongly connected component with more than one node, by the algorithm of Tarjan (1972).
    fn smallest_component(&self, kinds: &[Why]) -> Option<Vec<u32>> {
        const NEW: u32 = u32::MAX;
        let nodes = self.first.len() - 1;
        let (mut index, mut low) = (vec![NEW; nodes], vec![0_u32; nodes]);
        let mut is_open = vec![false; nodes];
        let (mut open, mut path): (Vec<u32>, Vec<(u32, usize)>) = (Vec::new(), Vec::new());
        let mut count = 0;
        let mut smallest: Option<Vec<u32>> = None;
        for root in 0..nodes as u32 {
            if index[root as usize] != NEW {
                continue;
            }
            path.push((root, self.first[root as usize]));
            while let Some((node, next)) = path.pop() {
                let at = node as usize;
                if index[at] == NEW {
                    (index[at], low[at], is_open[at]) = (count, count, true);
                    count += 1;
                    open.push(node);
                }
                let mut edges = next..self.first[at + 1];
                let deeper = edges.find(|edge| {
                    let Edge { to, why, .. } = self.edges[*edge];
                    if why != Why::Pass && !kinds.contains(&why) {
                        return false;
                    }
                    if is_open[to as usize] {
                        low[at] = low[at].min(index[to as usize]);
                    }
                    index[to as usize] == NEW
                });
                if let Some(edge) = deeper {
                    path.push((node, edge + 1));
                    let to = self.edges[edge].to;
                    path.push((to, self.first[to as usize]));
                    continue;
                }
                if let Some((parent, _)) = path.last() {
                    low[*parent as usize] = low[*parent as usize].min(low[at]);
                }
                if low[at] == index[at] {
                    let begin = open.iter().rposition(|of| *of == node).expect("an open node");
                    let component = open.split_off(begin);
                    component.iter().for_each(|of| is_open[*of as usize] = false);
                    if component.len() > 1 && smallest.as_ref().is_none_or(|of| component.len() < of.len()) {
                        smallest = Some(component);
                    }
                }
            }
        }
        smallest
    }

    /// Returns a shortest path of at least one edge. An edge from an auxiliary node counts nothing.
    fn path(&self, from: u32, to: u32, kinds: &[Why], is_in: &Within) -> Option<Vec<Edge>> {
        let mut came_by: Vec<Option<usize>> = vec![None; self.first.len() - 1];
        let mut queue: VecDeque<u32> = VecDeque::from([from]);
        while let Some(node) = queue.pop_front() {
            for edge in self.first[node as usize]..self.first[node as usize + 1] {
                let Edge { to: next, why, .. } = self.edges[edge];
                let is_usable = why == Why::Pass || kinds.contains(&why);
                if !is_usable || !is_in.has(next) || came_by[next as usize].is_some() {
                    continue;
                }
                came_by[next as usize] = Some(edge);
                if next == to {
                    return Some(self.taken(from, to, &came_by));
                }
                if why == Why::Pass {
                    queue.push_front(next);
                } else {
                    queue.push_back(next);
                }
            }
        }
        None
    }

    fn taken(&self, from: u32, to: u32, came_by: &[Option<usize>]) -> Vec<Edge> {
        let (mut path, mut node) = (Vec::new(), to);
        loop {
            let edge = self.edges[came_by[node as usize].expect("the search came to this node")];
            path.push(edge);
            node = edge.from;
            if node == from {
                break;
            }
        }
        path.reverse();
        path
    }
}

/// A set of nodes.
struct Within(Vec<bool>);

impl Within {
    fn new(nodes: usize, of: &[u32]) -> Within {
        let mut within = vec![false; nodes];
        of.iter().for_each(|node| within[*node as usize] = true);
        Within(within)
    }

    fn has(&self, node: u32) -> bool {
        self.0[node as usize]
    }
}

fn length(path: &[Edge]) -> usize {
    path.iter().filter(|edge| edge.why != Why::Pass).count()
}

/// Joins each edge to an auxiliary node with those that lead on from it.
fn without_auxiliary(cycle: &[Edge]) -> Vec<Edge> {
    let begin =
        cycle.iter().position(|edge| edge.why != Why::Pass).expect("auxiliary nodes alone have no cycle");
    let mut joined: Vec<Edge> = Vec::new();
    for edge in cycle[begin..].iter().chain(&cycle[..begin]) {
        match joined.last_mut() {
            Some(last) if edge.why == Why::Pass => last.to = edge.to,
            _ => joined.push(*edge),
        }
    }
    joined
}
