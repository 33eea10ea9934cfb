//! Every family of systems over the device, with its own verification, while the node's engine or its NIC runs atomics.

use super::{Atomic, Resources, device, node, verified};
use crate::support::Node;

/// Few operations: Soft-RoCE in a virtual machine executes about a hundred a second.
const SMALL: [&str; 4] = ["--tasks", "4", "--operations", "300"];

/// Runs a benchmark of one store at one node.
#[track_caller]
fn one(atomic: Atomic, arguments: &[&str]) {
    let before = Resources::now();
    let node = node(atomic, &["--memory", "160MiB"]);
    let all = [arguments, &SMALL].concat();
    let report = verified(&node.listening(), &all);
    println!("{atomic:?} {}: {} a second", arguments.join(" "), report["ops_per_s"]);
    drop(node);
    before.are_back();
}

/// Runs a benchmark on a pool of three nodes.
#[track_caller]
fn three(atomic: Atomic, arguments: &[&str]) {
    let before = Resources::now();
    let nodes: Vec<Node> = (0..3).map(|_| node(atomic, &["--memory", "160MiB"])).collect();
    let urls: Vec<String> = nodes.iter().map(Node::listening).collect();
    verified(&urls.join(","), &[arguments, &SMALL].concat());
    drop(nodes);
    before.are_back();
}

/// Number of records of a system's store.
fn records(system: &str) -> &'static str {
    // A benchmark loads a store by 64 tasks. In an empty radix tree they all change the same few slots, one after the
    // other, and in the virtual machine the last of 64 gives up before its turn.
    if system == "smart" { "16" } else { "100" }
}

macro_rules! stores {
    ($($name:ident: $run:ident($atomic:ident, $system:literal $(, $more:literal)*);)+) => {
        $(
            #[test]
            #[ignore = "takes an RDMA device: cargo xtask verbs"]
            fn $name() {
                let (family, system) = $system.split_once(' ').expect("a family and a system");
                let chosen = match family {
                    "latch" => vec!["latch", "--scheme", system, "--objects", "100"],
                    "blocks" => vec!["blocks", "--system", system, "--blocks", "50"],
                    "txn" => vec!["txn", "--system", system, "--records", "100"],
                    _ => vec!["ycsb", "--system", system, "--records", records(system), "--workload", "a"],
                };
                $run(Atomic::$atomic, &[&chosen[..], &[$($more),*]].concat());
            }
        )+
    };
}

stores! {
    prism_kv_by_chains: one(Engine, "ycsb prism-kv");
    pilaf_by_reads_and_calls: one(Engine, "ycsb pilaf");
    pilaf_with_a_nics_atomics: one(Nic, "ycsb pilaf");
    chequer_by_reads_and_calls: one(Engine, "ycsb chequer");
    chequer_with_a_nics_atomics: one(Nic, "ycsb chequer");
    farm_kv_by_reads_and_calls: one(Engine, "ycsb farm-kv");
    farm_kv_with_a_nics_atomics: one(Nic, "ycsb farm-kv");
    smart_with_an_engines_atomics: one(Engine, "ycsb smart");
    latches_with_an_engines_atomics: one(Engine, "latch v2");
    latches_with_a_nics_atomics: one(Nic, "latch v2");
    unlatching_writes_with_a_nics_atomics: one(Nic, "latch unlatch");
    latches_for_readers_with_a_nics_atomics: one(Nic, "latch async-rw");
    prism_rs_on_three_nodes: three(Engine, "blocks prism-rs");
    abd_lock_on_three_nodes: three(Engine, "blocks abd-lock");
    abd_lock_on_three_nodes_with_a_nics_atomics: three(Nic, "blocks abd-lock");
    prism_tx_at_one_node: one(Engine, "txn prism-tx");
}

/// The simulator tries systems on a model of a NIC: it must offer what the device offers, no more and no less.
#[test]
#[ignore = "takes an RDMA device: cargo xtask verbs"]
fn the_simulated_device_has_the_capabilities_of_the_real_one() {
    use farside_fabrics::verbs::device::devices;
    use farside_remote::{Capabilities, Fabric, NodeId};
    use farside_sim::hardware::PACKET_MAX;
    use farside_sim::nic::{Device, Timing};
    // The capabilities do not depend on the times.
    let timing = Timing {
        flight_ns: 0,
        flight_spread_ns: 0,
        link_gbit: 0,
        op_ps: 0,
        lists_are_ops: false,
        packet_max: PACKET_MAX,
        fetch_ns: 0,
        fetch_spread_ns: 0,
        land_spread_ns: 0,
        atomic_ns: 0,
        slot_ns: 0,
        slot_spread_ns: 0,
        on_chip_ns: 0,
        slot_mask: 0,
        relaxed: false,
    };
    let simulated = Device { timing, has_masked_cas: false, has_on_chip_words: false };
    let name = device();
    let listed = devices().expect("the library finds the device");
    let real = listed.iter().find(|listed| listed.name == name).expect("the device is listed");
    // The CPU copies the lines of a device in software, and may be interrupted in the middle of a line.
    let cut = if real.is_software { Capabilities::WHOLE_LINES } else { Capabilities::NONE };
    assert_eq!(real.capabilities(), simulated.capabilities().without(cut));
    let nic = node(Atomic::Nic, &["--memory", "32MiB"]);
    let of = |node: &Node| {
        let pool = farside::connect(&node.listening()).expect("the node serves");
        pool.endpoint_here().expect("a session").capabilities(NodeId(0))
    };
    assert_eq!(of(&nic), simulated.capabilities().without(cut).and(Capabilities::CALLS));
    let engine = node(Atomic::Engine, &["--memory", "32MiB"]);
    assert_eq!(of(&engine), Capabilities::SOFTWARE, "an engine runs what the NIC does not");
}
