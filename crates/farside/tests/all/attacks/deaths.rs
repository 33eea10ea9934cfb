//! Clients that are killed in the middle of a chain: the node reclaims everything that they held.

use crate::attacks::target::Target;
use crate::attacks::{on_each_carrier, on_each_carrier_and_device};
use crate::support::until;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

on_each_carrier_and_device![clients_killed_during_a_chain_leave_nothing];

/// Environment variable for a child: url of the node.
const URL: &str = "FARSIDE_TEST_URL";
/// Environment variable for a child: number of operations after which it dies.
const OPERATIONS: &str = "FARSIDE_TEST_OPERATIONS";
/// Number of keys that children put and delete.
const KEYS: u64 = 32;

/// Entry point of child processes. Does nothing when it runs as a test.
#[test]
fn child() {
    let Ok(url) = std::env::var(URL) else { return };
    let operations: u64 = std::env::var(OPERATIONS).expect("a number").parse().expect("a number");
    let pool = farside::connect(&url).expect("the node serves");
    let mut client = farside::local::Client::open(&pool, "default").expect("a store");
    let mut word = operations.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut done = 0;
    loop {
        word = word.wrapping_mul(0xd134_2543_de82_ef95).wrapping_add(1);
        let key = [b"victim", &(word >> 40 & (KEYS - 1)).to_le_bytes()[..]].concat();
        // A client holds buffers between chains only while it puts a large value, so half of the children die then.
        let is_large = word >> 60 == 0 || done == operations && operations.is_multiple_of(2);
        let len = if is_large { 200_000 } else { 16 + (word >> 32 & 1023) as usize };
        // Any outcome is fine: other children use the same keys, and some die.
        let mut operate = || match word >> 35 & 3 == 0 && !is_large {
            true => client.delete(&key).map(drop),
            false => client.put(&key, &vec![done as u8; len]),
        };
        if done == operations {
            // Dies while it repeats the operation, after a random fraction of the time that the first one takes.
            let since = Instant::now();
            let _any_outcome = operate();
            let wait = since.elapsed() * (word >> 57) as u32 / 128;
            std::thread::spawn(move || {
                std::thread::sleep(wait);
                rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
            });
        }
        let _any_outcome = operate();
        done += 1;
    }
}

fn victim(url: &str, operations: u64) -> Child {
    let mut command = Command::new(std::env::current_exe().expect("this test has a file"));
    command.args(["--exact", "attacks::deaths::child", "--nocapture"]);
    command.env(URL, url).env(OPERATIONS, operations.to_string());
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the command starts")
}

fn wave(target: &Target, carrier: &str, from: u64, count: u64) {
    let children: Vec<Child> =
        (from..from + count).map(|n| victim(target.url(carrier), n * 7 % 41)).collect();
    for mut child in children {
        let mut status = None;
        until("a child has died", || {
            status = child.try_wait().expect("it is our child");
            status.is_some()
        });
        use std::os::unix::process::ExitStatusExt;
        assert_eq!(status.and_then(|status| status.signal()), Some(9), "the child killed itself");
    }
}

/// Deletes every key that children use, so that the only live buffers are tombstones.
fn cleared(target: &Target) {
    let pool = farside::connect(&target.node.url()).expect("the node serves");
    let client = pool.open("default").expect("a store");
    for n in 0..KEYS {
        client.put([b"victim", &n.to_le_bytes()[..]].concat(), "x").wait().expect("stored");
        client.delete([b"victim", &n.to_le_bytes()[..]].concat()).wait().expect("deleted");
    }
}

fn clients_killed_during_a_chain_leave_nothing(carrier: &'static str) {
    // In the virtual machine, clients start slowly.
    let (count, at_once) = if carrier == "verbs" { (24, 4) } else { (100, 20) };
    deaths(carrier, count, at_once);
}

#[test]
#[ignore = "takes minutes: cargo xtask soak"]
fn soak_a_thousand_killed_clients_leave_nothing() {
    for carrier in ["udp", "tcp", "ring"] {
        deaths(carrier, 1000, 50);
    }
}

fn deaths(carrier: &str, count: u64, at_once: u64) {
    let target = Target::start();
    let witness = target.witness(carrier);
    let before = target.now();
    let buffers = |target: &Target| {
        let stat = target.stat("default");
        let of = |name: &str| stat[name].as_u64().expect("a number");
        (of("live_buffers"), of("retired_buffers"))
    };
    // A first wave allocates everything that is allocated once, such as buffer pools and segments.
    wave(&target, carrier, 0, at_once);
    cleared(&target);
    target.assert_as_before(before);
    until("the first wave's buffers are free again", || buffers(&target) == (KEYS, 0));
    let (resident, ended) = (target.resident_kib(), target.count("engine_sessions_ended_total"));
    for first in (0..count).step_by(at_once as usize) {
        wave(&target, carrier, first, at_once);
        witness.assert_well();
    }
    cleared(&target);
    target.assert_as_before(before);
    until("every buffer is free again", || buffers(&target) == (KEYS, 0));
    target.reaches("engine_sessions_ended_total", ended + count);
    let scanned = target.count("scanned_buffers_total");
    let grown = target.resident_kib() as i64 - resident as i64;
    println!(
        "{count} clients killed over {carrier}: {scanned} lost buffers were found, the node grew by {grown} KiB"
    );
    assert!(scanned > 0, "no child died while it held a buffer");
    assert!(grown < 16 << 10, "{grown} KiB");
    witness.assert_well();
}
