//! Several hosts, each a network namespace: a node, and two clients on links of their own. Needs root and `ip`;
//! otherwise the tests print that they are skipped.

use crate::faults::worker::{self, Fates, Role, await_report, judge};
use crate::faults::{TOKEN_SHA256, connect, words};
use crate::support::{Node, until};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::{Duration, Instant};

/// Namespaces for a node and two clients. Deleted when dropped.
struct Hosts {
    name: String,
}

/// Name of each client, and the third number of the IPv4 addresses on its link.
const CLIENTS: [(&str, u8); 2] = [("a", 1), ("b", 2)];
/// Bytes of a datagram that fits into a frame of 1500 bytes, together with the IPv6 and UDP headers (48 bytes) and the
/// seal (32 bytes).
const DATAGRAM: usize = 1500 - 48 - 32;

fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split_whitespace()).output();
    let output = output.map_err(|error| format!("ip: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("ip {arguments}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}

impl Hosts {
    fn make(scheme: &str) -> Result<Hosts, String> {
        let hosts = Hosts { name: format!("fs{}{}", std::process::id(), &scheme[..1]) };
        let name = &hosts.name;
        ip(&format!("netns add {name}-node"))?;
        for (client, line) in CLIENTS {
            ip(&format!("netns add {name}-{client}"))?;
            ip(&format!(
                "link add {name}{client}0 netns {name}-node type veth peer name {name}{client}1 netns {name}-{client}"
            ))?;
            for (host, end) in [("node", 0), (client, 1)] {
                ip(&format!(
                    "-n {name}-{host} addr add 10.77.{line}.{}/24 dev {name}{client}{end}",
                    end + 1
                ))?;
                ip(&format!("-n {name}-{host} link set {name}{client}{end} up"))?;
            }
        }
        Ok(hosts)
    }

    /// Returns a command that runs `command` on a host.
    fn on(&self, host: &str, command: &Command) -> Command {
        let mut inside = Command::new("ip");
        inside.args(["netns", "exec", &format!("{}-{host}", self.name)]);
        inside.arg(command.get_program()).args(command.get_args());
        inside
    }

    /// Sets the state of a client's link: `up` or `down`.
    fn line(&self, client: &str, state: &str) {
        ip(&format!("-n {0}-node link set {0}{client}0 {state}", self.name))
            .unwrap_or_else(|error| panic!("{error}"));
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in ["node", "a", "b"] {
            let _not_made = ip(&format!("netns del {}-{host}", self.name));
        }
    }
}

#[test]
fn a_session_survives_a_short_cut_and_reports_a_long_one_over_udp() {
    cuts("udp", 0.02, 0.0, DATAGRAM);
}

#[test]
fn a_session_survives_a_short_cut_and_reports_a_long_one_over_tcp() {
    cuts("tcp", 0.0, 0.02, 24 * 1024);
}

fn cuts(scheme: &str, loss: f64, delay: f64, datagram: usize) {
    let hosts = match Hosts::make(scheme) {
        Ok(hosts) => hosts,
        Err(reason) => return println!("skipped: several hosts need root and network namespaces ({reason})"),
    };
    let listen = format!("{scheme}://0.0.0.0:7460");
    let mut arguments =
        vec!["--memory", "96MiB", "--store", "default", "--quota", "48MiB", "--listen", &listen];
    let folder = tempfile::tempdir().expect("a folder");
    let tokens = folder.path().join("tokens.toml");
    let entry = format!(
        "[[token]]\nname = 'all'\nsha256 = '{TOKEN_SHA256}'\nadmin = true\nstores = {{ '*' = 'all' }}\n"
    );
    std::fs::write(&tokens, entry).expect("a file");
    std::fs::set_permissions(&tokens, std::fs::Permissions::from_mode(0o600)).expect("its mode");
    let tokens = tokens.display().to_string();
    arguments.extend(["--tokens", &tokens, "--shm-trusts-all"]);
    let node = Node::within(|command| hosts.on("node", &command), &arguments);
    connect(&node.url()).create_store(&words()).expect("the node has memory");
    let [a, b] = CLIENTS.map(|(client, line)| {
        let url = format!("{scheme}://10.77.{line}.1:7460");
        let seconds = if client == "a" { 120.0 } else { 18.0 };
        let role = Role::Operate { url, base: u32::from(line) * worker::TASKS, seconds, loss, delay };
        let child = worker::start(&role, &node.folder().join(client), |command| hosts.on(client, &command));
        assert_eq!(await_report::<usize>(&child, "datagram"), datagram, "the datagram fits a frame");
        child
    });
    until("both work", || {
        await_report::<u64>(&a, "progress") > 100 && await_report::<u64>(&b, "progress") > 100
    });

    hosts.line("a", "down");
    let cut = Instant::now();
    std::thread::sleep(Duration::from_secs(2));
    hosts.line("a", "up");
    // The child reported progress while it was cut off: those lines are read first.
    let before = await_report::<u64>(&a, "progress");
    until("the client continues after a short cut", || await_report::<u64>(&a, "progress") > before + 1000);
    println!("{scheme}: a cut of 2 s; the client had continued {:?} after the cut began", cut.elapsed());
    assert_eq!(node.sessions(), 2, "the sessions survive");

    hosts.line("a", "down");
    std::thread::sleep(Duration::from_secs(10));
    hosts.line("a", "up");
    let strikes: String = await_report(&a, "strikes");
    let reported: (u32, Vec<Fates>) = await_report(&a, "fates");
    for fates in &reported.1 {
        let next = fates.next.as_ref().unwrap_or_else(|| panic!("the session did not end: {fates:?}"));
        assert!(next.ran == "No" && next.words.contains("reconnect"), "{next:?}");
    }
    let failed: u64 = reported.1.iter().map(|fates| fates.failed).sum();
    let [no, yes, unknown] = judge(&node.url(), &reported);
    println!(
        "{scheme}: a cut of 10 s; {strikes}; {failed} operations failed before the session ended; of the last ones, \
         {no} did not run, {yes} ran, {unknown} are unknown"
    );
    let reported: (u32, Vec<Fates>) = await_report(&b, "fates");
    assert!(
        reported.1.iter().all(|fates| fates.last.is_none() && fates.failed == 0),
        "the other client is not affected"
    );
    judge(&node.url(), &reported);
}
