//! Test that memory which is about to be filled gets huge pages: a table, its larger successor, and the buffers of
//! clients, in shared memory and over an engine.
//!
//! This test has its own binary, because it counts the huge pages of its whole process.

mod support;

use farside_fabrics::executor::block_on;
use farside_fabrics::memory::{Mapping, Pages};
use farside_fabrics::session::client::Config;
use farside_fabrics::session::endpoint::Endpoint;
use farside_fabrics::udp::UdpLine;
use farside_node::host::{Listen, Options};
use farside_remote::arena::SEGMENT_SIZE;
use farside_remote::control::Ask;
use farside_remote::{Memory, NodeId};
use farside_systems::kv::Kv;
use farside_systems::kv::prism_kv::PrismKv;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use support::{Home, run};

/// Returns the number of bytes of this process's shared memory that lie in huge pages.
fn huge() -> u64 {
    let maps = std::fs::read_to_string("/proc/self/smaps").expect("procfs");
    let lines = maps.lines().filter_map(|line| line.strip_prefix("ShmemPmdMapped:"));
    let kib = lines.map(|line| line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number"));
    kib.sum::<u64>() << 10
}

/// Whether the system currently has as many huge pages as the test needs.
fn has_plenty() -> bool {
    let memory = Mapping::create(MEMORY, Pages::Auto).expect("memory");
    let before = huge();
    memory.will_fill(0, MEMORY);
    huge().saturating_sub(before) + (4 << 20) >= MEMORY
}

const MEMORY: u64 = 192 << 20;

#[test]
fn tables_and_buffers_lie_in_huge_pages() {
    if !Mapping::makes_pages_huge().expect("memory") {
        return eprintln!("skipped: this system has no huge pages for shared memory");
    }
    // A process that waits long for one huge page requests no more. On a busy machine, that may happen to any process.
    for trials_left in (0..5).rev() {
        match trial() {
            Ok(()) => return,
            Err(_) if !has_plenty() => return eprintln!("skipped: this system is short of huge pages"),
            Err(why) => assert!(trials_left > 0, "{why}"),
        }
    }
}

fn trial() -> Result<(), String> {
    let memory = Mapping::create(MEMORY, Pages::Auto).expect("memory");
    let before = huge();
    if before == 0 {
        if memory.page_size().0 != 2 << 20 {
            return Err("the memory itself got no huge pages".into());
        }
        eprintln!("skipped: huge pages are reserved on this system");
        return Ok(());
    }
    let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 0);
    let home = Home::with(memory, Options { listen: vec![Listen::Udp(address)], ..Options::default() });
    let check = |what: &str, since: u64, expected: u64| {
        let made = huge().saturating_sub(since);
        let reported = format!("{what}: {made} bytes of at least {expected} lie in huge pages");
        if made >= expected { Ok(()) } else { Err(reported) }
    };

    let store = home.create("s", 64, r#"{"items": 100000}"#);
    check("a table", before, store.table_len)?;

    // Each value fills most of a buffer of 64 KiB.
    let value = [7; 60_000];
    let filled = 10 * SEGMENT_SIZE;
    let keys = |from: u32| (from..from + (filled >> 16) as u32).map(u32::to_be_bytes);
    let before = huge();
    let mut client = home.client("s");
    let endpoint = Rc::clone(client.fabric());
    for key in keys(0) {
        run(&endpoint, client.put(&key, &value)).expect("stored");
    }
    check("buffers filled by a client in this process", before, filled - 2 * SEGMENT_SIZE)?;

    let Listen::Udp(address) = home.host.listening()[0] else { panic!("the node listens on UDP") };
    let line = UdpLine::connect(address, None).expect("a socket");
    let config = Config { identity: 1, incarnation: 1, nonce: 7, ..Config::default() };
    let endpoint = Rc::new(Endpoint::open(line, NodeId(0), config).expect("a session"));
    let opened = block_on(&endpoint, PrismKv::open(Rc::clone(&endpoint), NodeId(0), "s"));
    let mut remote = opened.expect("the store exists");
    let before = huge();
    for key in keys(1000) {
        block_on(&endpoint, remote.put(&key, &value)).expect("stored");
    }
    check("buffers filled by an engine", before, filled - 2 * SEGMENT_SIZE)?;

    let before = huge();
    home.ask(Ask::RebuildStore { name: "s".into(), parameters: r#"{"items": 800000}"#.into() });
    // The larger table has eight times the size of the first one, whose pages may have been freed by now.
    check("a larger table", before, 6 * store.table_len)
}
