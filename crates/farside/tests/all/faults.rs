//! Guarantees for clients over `udp` and `tcp` when datagrams, processes and networks fail.
//!
//! Invariant: the outcome that an error claims is compared with the contents of the store.
//! Invariant: every fault that a test injects has struck, or the test fails.

mod datagrams;
mod fences;
mod hosts;
mod pauses;
mod rebuilds;
mod worker;

use crate::support::Node;
use farside::{NewStore, Pool};
use farside_fabrics::layer::fault::Faults;

/// A store without items. Tests use the words of its table as counters.
const WORDS: &str = "words";

/// Starts a node that serves at `listen`, with the stores `default` and [`WORDS`]. Returns the node and its url.
fn node_at(listen: &str) -> (Node, String) {
    let node =
        Node::with(&["--memory", "96MiB", "--store", "default", "--quota", "48MiB", "--listen", listen]);
    let url = listening(&node);
    (node, url)
}

fn listening(node: &Node) -> String {
    let info = node.run(["info", "--json"]).done().json();
    farside::connect(&node.url()).and_then(|pool| pool.create_store(&words())).expect("the node has memory");
    info["listening"][0].as_str().expect("the node listens").to_owned()
}

fn words() -> NewStore {
    NewStore { items: Some(1024), ..NewStore::prism_kv(WORDS, 4 << 20) }
}

/// Token for nodes that other hosts can reach. Nodes on loopback require no token and seal no packets.
const TOKEN: &str = "the token of tests that need several hosts";
/// SHA-256 of the token.
const TOKEN_SHA256: &str = "261140cf58d8214015169d316d4ca1d414d23dcf5d30346cd89e5d12dfd8e255";

fn connect(url: &str) -> Pool {
    let token = (!url.starts_with("udp://127.")).then(|| TOKEN.to_owned());
    let options = farside::Options { token, ..farside::Options::default() };
    farside::connect_with(url, &options).unwrap_or_else(|error| panic!("{error}"))
}

/// Runs a worker's role if another test started this process as a worker. Otherwise does nothing.
#[test]
fn child() {
    worker::run_role();
}

#[test]
#[ignore = "takes minutes: cargo xtask soak"]
fn soak_every_operation_completes_once_under_faults() {
    for seed in 1..=10 {
        let faults = Faults { seed, ..datagrams::lossy(0.05) };
        datagrams::every_operation_completes_once("udp", faults, 20_000);
        datagrams::every_operation_completes_once(
            "tcp",
            Faults { seed, delay: 0.05, ..Faults::default() },
            20_000,
        );
    }
}
