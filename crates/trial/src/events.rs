//! The network's events as JSON lines. Each line has an event of a packet: sent, lost, duplicated, delayed, delivered,
//! among others.
//!
//! The format is `docs/sim-events.md`.
//!
//! Invariant: recording events does not change the run.

use crate::{Carrier, Scene};
use farside_fabrics::session::packet;
use farside_sim::network::{Address, Event, What};
use serde::Serialize;

/// Callback that receives each line of JSON.
pub type Lines = Box<dyn FnMut(&str)>;

#[derive(Serialize)]
struct Line<'a> {
    time: u64,
    packet: u64,
    event: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    fault: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    late_ns: Option<u64>,
    from: &'a str,
    to: &'a str,
    bytes: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    carries: Option<String>,
}

/// Passes a line for each later event of the network to `lines`.
pub(crate) fn record(scene: &Scene, mut lines: Lines) {
    if scene.drawn.carrier == Carrier::Direct {
        return; // There are no packets.
    }
    let name = namer(scene);
    scene.network.record(move |event: &Event<'_>| {
        let Event { at, packet, from, to, what, bytes, verb } = *event;
        let (event, fault, late_ns) = match what {
            What::Send => ("send", None, None),
            What::Drop(fault) => ("drop", Some(fault), None),
            What::Duplicate => ("duplicate", None, None),
            What::Delay(fault, late) => ("delay", Some(fault), Some(late)),
            What::Deliver => ("deliver", None, None),
            What::Miss => ("miss", None, None),
            What::HangUp(fault) => ("hang-up", fault, None),
        };
        let line = Line {
            time: at,
            packet,
            event,
            fault: fault.map(|fault| fault.name()),
            late_ns,
            from: &name(from),
            to: &name(to),
            bytes: bytes.len(),
            carries: match verb {
                Some(verb) => Some(verb.to_owned()),
                None => (!bytes.is_empty()).then(|| packet::describe(bytes)),
            },
        };
        lines(&serde_json::to_string(&line).expect("plain data"));
    });
}

/// Returns a function that names addresses: `node 0 engine 1`, `client 2 port 65537`.
fn namer(scene: &Scene) -> impl Fn(Address) -> String + 'static {
    let nodes: Vec<_> = scene.sites.iter().map(|site| site.node.host()).collect();
    let clients = scene.hosts.clone();
    move |Address { host, port }| match nodes.iter().position(|node| *node == host) {
        Some(node) => format!("node {node} engine {port}"),
        None => match clients.iter().position(|client| *client == host) {
            Some(client) => format!("client {client} port {port}"),
            None => format!("host {} port {port}", host.0),
        },
    }
}
