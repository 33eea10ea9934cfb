//! Checks UDP buffers and segmentation, and finds the processes at Farside's default ports.
//!
//! Invariant: ports are looked up in the system's tables of sockets; no port is bound.

use super::check::Check;
use super::system::{Capability, has};
use crate::cli::human_bytes;
use farside::config::DATA_PORT;
use farside_fabrics::udp::{INBOUND_BYTES, segments};

pub(super) fn checks() -> Vec<Check> {
    let text = super::text;
    let may = text("/proc/self/status").is_some_and(|status| has(&status, Capability::NetAdmin));
    let mut checks = vec![
        inbound(text("/proc/sys/net/core/rmem_max").as_deref(), may),
        segmentation(segments().map_err(|error| error.to_string())),
    ];
    let [tcp, udp] = ["tcp", "udp"].map(|name| {
        let tables = [name.to_owned(), format!("{name}6")];
        let tables: Vec<String> =
            tables.iter().filter_map(|name| text(&format!("/proc/net/{name}"))).collect();
        (!tables.is_empty()).then(|| tables.concat())
    });
    let by_port = |port: &Port| {
        let tables = [(LISTENS, tcp.as_deref()), (BOUND, udp.as_deref().filter(|_| port.has_udp))];
        if tables.iter().all(|(_, table)| table.is_none()) {
            return judged(port, None);
        }
        let sockets =
            tables.iter().flat_map(|(state, table)| sockets(table.unwrap_or_default(), port.number, state));
        let sockets: Vec<u64> = sockets.collect();
        judged(port, Some(holder(&sockets)))
    };
    checks.extend(PORTS.iter().map(by_port));
    checks
}

fn inbound(rmem_max: Option<&str>, may_exceed: bool) -> Check {
    const ID: (&str, &str) = ("net.udp_buffers", "UDP buffers");
    let wanted = INBOUND_BYTES as u64;
    let Some(most) = rmem_max.and_then(|text| text.trim().parse::<u64>().ok()) else {
        return Check::unknown(ID.0, ID.1);
    };
    let found = format!("net.core.rmem_max is {}", human_bytes(most));
    if most >= wanted {
        return Check::ok(ID.0, ID.1, found);
    }
    if may_exceed {
        return Check::ok(ID.0, ID.1, format!("{found}, which this process may exceed by CAP_NET_ADMIN"));
    }
    Check::note(ID.0, ID.1, found)
        .because("bursts that exceed it are dropped and must be sent again")
        .remedy(format!("sysctl -w net.core.rmem_max={wanted}"))
}

fn segmentation(found: Result<(usize, usize), String>) -> Check {
    const ID: (&str, &str) = ("net.udp_segmentation", "UDP segmentation");
    const WHY: &str = "each datagram between hosts takes a system call of its own, which costs CPU";
    match found {
        Ok((send @ 2.., receive @ 2..)) => Check::ok(
            ID.0,
            ID.1,
            format!("one call sends up to {send} datagrams (GSO) and receives up to {receive} (GRO)"),
        ),
        Ok((send, receive)) => {
            let lacks: Vec<&str> = [("GSO", send), ("GRO", receive)]
                .iter()
                .filter(|(_, count)| *count < 2)
                .map(|(name, _)| *name)
                .collect();
            Check::note(ID.0, ID.1, format!("no {}", lacks.join(", no "))).because(WHY)
        }
        Err(reason) => Check::warn(ID.0, ID.1, reason).because("udp:// needs such sockets"),
    }
}

/// A default port of Farside.
struct Port {
    id: &'static str,
    what: &'static str,
    number: u16,
    has_udp: bool,
    remedy: &'static str,
}

const PORTS: [Port; 2] = [
    Port {
        id: "port.data",
        what: "port 7460, data",
        number: DATA_PORT,
        has_udp: true,
        remedy: "serve at another port: farside serve --listen tcp://127.0.0.1:7461",
    },
    Port {
        id: "port.admin",
        what: "port 7400, admin",
        number: 7400,
        has_udp: false,
        remedy: "serve at another port: farside serve --admin 127.0.0.1:7401",
    },
];

/// Code of a listening TCP socket's state in the system's tables.
const LISTENS: &str = "0A";
/// Code of a bound UDP socket's state in the system's tables.
const BOUND: &str = "07";

/// Returns the inodes of the sockets at a port that are in `state`. `table` is the content of a file such as
/// `/proc/net/tcp`.
fn sockets(table: &str, port: u16, state: &str) -> Vec<u64> {
    const STATE: usize = 3;
    const SOCKET: usize = 9;
    let port = format!("{port:04X}");
    let lines = table.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (_, local) = fields.get(1)?.rsplit_once(':')?;
        let is_it = local == port && *fields.get(STATE)? == state;
        is_it.then(|| fields.get(SOCKET)?.parse().ok()).flatten()
    });
    lines.collect()
}

/// Owner of the socket at a port.
#[derive(Clone, Debug, PartialEq)]
enum Holder {
    Nobody,
    /// A process whose descriptors this process may not read.
    Unseen,
    /// Pid and name of a process.
    Process(u32, String),
}

/// Finds the owner of one of `sockets` (inodes), by the descriptors of all processes that this process may inspect.
fn holder(sockets: &[u64]) -> Holder {
    if sockets.is_empty() {
        return Holder::Nobody;
    }
    let links: Vec<String> = sockets.iter().map(|socket| format!("socket:[{socket}]")).collect();
    for pid in super::names("/proc").unwrap_or_default().iter().filter_map(|name| name.parse::<u32>().ok()) {
        let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        let mut targets = descriptors.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
        if targets.any(|target| links.iter().any(|link| target.as_os_str() == link.as_str())) {
            let name = super::text(&format!("/proc/{pid}/comm")).unwrap_or_default();
            return Holder::Process(pid, name.trim().to_owned());
        }
    }
    Holder::Unseen
}

fn judged(port: &Port, holder: Option<Holder>) -> Check {
    let (found, is_ours) = match holder {
        None => return Check::unknown(port.id, port.what),
        Some(Holder::Nobody) => return Check::ok(port.id, port.what, "free"),
        Some(Holder::Unseen) => ("in use by a process that this user may not inspect".into(), false),
        Some(Holder::Process(pid, name)) => (format!("in use by {name}, pid {pid}"), name == "farside"),
    };
    match is_ours {
        true => Check::ok(port.id, port.what, found),
        false => Check::note(port.id, port.what, found).remedy(port.remedy),
    }
}

/// Runs the checks on arbitrary text instead of the system's files.
#[cfg(test)]
pub(super) fn of_any(text: &str) -> Vec<Check> {
    let found = sockets(text, DATA_PORT, LISTENS);
    vec![inbound(Some(text), found.is_empty()), segmentation(Err(text.into()))]
}

#[cfg(test)]
mod tests {
    use super::super::check::Verdict::*;
    use super::super::tests::is;
    use super::*;

    const NOTHING: [u64; 0] = [];

    #[test]
    fn udp_buffers_are_compared_with_what_an_endpoint_requests() {
        is(&inbound(Some("4194304\n"), false), Ok, "4.0 MiB", "");
        is(&inbound(Some("212992\n"), false), Note, "208.0 KiB", "sysctl -w net.core.rmem_max=4194304");
        is(&inbound(Some("212992\n"), true), Ok, "may exceed", "");
        for odd in [None, Some(""), Some("-1"), Some("many")] {
            is(&inbound(odd, true), Note, "not known here", "");
        }
    }

    #[test]
    fn missing_segmentation_is_named() {
        is(&segmentation(Result::Ok((64, 64))), Ok, "sends up to 64 datagrams", "");
        is(&segmentation(Result::Ok((1, 64))), Note, "no GSO", "");
        is(&segmentation(Result::Ok((64, 1))), Note, "no GRO", "");
        is(&segmentation(Result::Ok((1, 0))), Note, "no GSO, no GRO", "");
        is(&segmentation(Err("denied".into())), Warn, "denied", "");
    }

    const TCP: &str = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1D24 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 41001 1 0 100 0 0 10 0
   1: 0100007F:1D24 0100007F:A2C4 01 00000000:00000000 00:00000000 00000000  1000        0 41002 1 0 20 4 0 10 -1
   2: 0100007F:A2C4 0100007F:1D24 01 00000000:00000000 00:00000000 00000000  1000        0 41003 1 0 20 4 0 10 -1
   3: 00000000:18EB 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 41004 1 0 100 0 0 10 0
   4: 00000000000000000000000001000000:1D24 0:0 0A 0:0 00:00000000 0  1000 0 41005 1 0
";

    #[test]
    fn only_a_listening_socket_holds_a_port() {
        assert_eq!(sockets(TCP, 7460, LISTENS), [41001, 41005]);
        assert_eq!(sockets(TCP, 6379, LISTENS), [41004]);
        assert_eq!(sockets(TCP, 7400, LISTENS), NOTHING);
        assert_eq!(sockets(TCP, 7460, BOUND), NOTHING);
        for odd in
            ["", "\n\n", "0:", "0: x 1D24 0A", " 0: 0100007F:1D24 0:0 0A", " 0: a:1D24 b 0A c d e f g h"]
        {
            assert_eq!(sockets(odd, 7460, LISTENS), NOTHING, "{odd}");
        }
    }

    #[test]
    fn a_port_in_use_is_fine_if_a_node_holds_it() {
        let [data, admin] = [&PORTS[0], &PORTS[1]];
        let process = |name: &str| Some(Holder::Process(7, name.into()));
        is(&judged(data, Some(Holder::Nobody)), Ok, "free", "");
        is(&judged(data, process("farside")), Ok, "in use by farside, pid 7", "");
        is(&judged(data, process("nginx")), Note, "in use by nginx, pid 7", "--listen tcp://127.0.0.1:7461");
        is(&judged(data, Some(Holder::Unseen)), Note, "may not inspect", "7461");
        is(&judged(admin, process("nginx")), Note, "in use by nginx, pid 7", "--admin 127.0.0.1:7401");
        is(&judged(data, None), Note, "not known here", "");
    }

    #[test]
    fn a_port_of_this_process_is_found() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = socket.local_addr().expect("bound").port();
        let Some(table) = super::super::text("/proc/net/tcp") else { return };
        let found = sockets(&table, port, LISTENS);
        assert_eq!(found.len(), 1, "{table}");
        assert!(matches!(holder(&found), Holder::Process(pid, _) if pid == std::process::id()));
    }
}
