//! Checks whether a node can be reached, and finds the step that fails.
//!
//! Invariant: nothing at the node is changed. The checks request its information and read a key.

use super::check::Check;
use super::fabrics::{describe_latency, measure};
use crate::cli::node::quoted;
use farside::config::Settings;
use farside::parts::{addresses, nodes_of};
use farside::{Error, NodeInfo, Options, Pool};
use farside_fabrics::executor::block_on;
use farside_fabrics::session::carrier::Line;
use farside_fabrics::session::endpoint::OpenError;
use farside_fabrics::shm::ConnectError;
use farside_fabrics::udp::UdpLine;
use farside_remote::control::Ask;
use farside_remote::fabric::ServiceId;
use farside_remote::{Fabric, NodeId};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

/// Urls and options of the nodes that the settings select, and the name of the store.
pub(super) type Selected = (Vec<(String, Options)>, String);

/// Returns the nodes that the settings select.
///
/// # Errors
/// A setting or the list of nodes is invalid: the failed check.
pub(super) fn selected(settings: Result<Settings, String>) -> Result<Selected, Check> {
    let failed = |reason| Check::fail("reach.settings", "settings", reason);
    let settings = settings.map_err(failed)?;
    let (token, tls_ca) = (settings.token().map_err(failed)?, settings.tls_ca().map_err(failed)?);
    let options = Options { token, tls_ca, insecure_udp: settings.insecure_udp };
    let nodes = nodes_of(&settings.pool.value, &options).map_err(|error| failed(error.to_string()))?;
    Ok((nodes, settings.store.value))
}

/// Runs the steps to one node in order, and passes the result of each to `tell`. Ends after the first step that fails.
///
/// # Errors
/// Those of `tell`.
pub(super) fn checks<E>(
    (url, options): &(String, Options),
    store: &str,
    mut tell: impl FnMut(Check) -> Result<(), E>,
) -> Result<(), E> {
    tell(known(url, options))?;
    let mut at = Vec::new();
    match Address::of(url) {
        Address::Invalid => return tell(no_address(url)),
        Address::Socket(path) => {
            let found = std::fs::symlink_metadata(path);
            let found =
                found.map(|found| (found.file_type().is_socket(), found.uid())).map_err(|error| error.kind());
            let check = socket(url, path, found, rustix::process::geteuid().as_raw());
            let is_there = check.remedy.is_none();
            tell(check)?;
            if !is_there {
                return Ok(());
            }
        }
        Address::Host(scheme) => {
            let since = Instant::now();
            // The part after `?` chooses a device of this host.
            match addresses(url.split('?').next().unwrap_or(url)) {
                Err(error) => return tell(Check::fail("reach.resolve", "name", error.to_string())),
                Ok(found) => at = found,
            }
            tell(resolved(&at, since.elapsed()))?;
            if scheme != "udp" {
                let tried: Vec<_> = at.iter().map(|&address| (address, dial(address))).collect();
                let check = connected(url, &tried);
                let is_there = check.remedy.is_none();
                tell(check)?;
                if !is_there {
                    return Ok(());
                }
            }
        }
    }
    let since = Instant::now();
    let pool = match farside::connect_with(url, options) {
        Ok(pool) => pool,
        Err(error) => return tell(refused(&error)),
    };
    tell(greeted(since.elapsed(), options))?;
    match pool.info() {
        Ok(info) => tell(release(&info, env!("CARGO_PKG_VERSION")))?,
        Err(error) => return tell(Check::fail("reach.release", "release", error.to_string())),
    }
    if pool.fabric() == "udp"
        && let Some(&address) = at.first()
    {
        tell(datagrams(&pool, address))?;
    }
    tell(round_trip(store, measure(&pool, store, None)))
}

/// Kind of address in a node's URL.
#[derive(Debug, PartialEq)]
enum Address<'a> {
    /// An address that no other process can serve: `local:`, or an invalid URL.
    Invalid,
    /// A socket of this host.
    Socket(&'a Path),
    /// A host and a port, with this scheme.
    Host(&'a str),
}

impl Address<'_> {
    fn of(url: &str) -> Address<'_> {
        match url.split_once(':') {
            Some((scheme @ ("udp" | "tcp" | "tls" | "verbs"), _)) => Address::Host(scheme),
            Some(("shm" | "ring", path)) if !path.is_empty() => Address::Socket(Path::new(path)),
            Some((scheme, _)) if !scheme.contains('/') => Address::Invalid,
            None if url.is_empty() => Address::Invalid,
            _ => Address::Socket(Path::new(url)),
        }
    }
}

fn known(url: &str, options: &Options) -> Check {
    let token = if options.token.is_some() { "a token" } else { "no token" };
    let trust = if options.tls_ca.is_some() { ", certificates to trust" } else { "" };
    Check::ok("reach.settings", "settings", format!("{url} with {token}{trust}"))
}

/// Explains why a URL is neither a socket nor a host.
fn no_address(url: &str) -> Check {
    let found = match url.split_once(':') {
        Some(("local", _)) => {
            "a node at local: runs in the client's own process, so there is no other to reach".into()
        }
        Some(("shm" | "ring", _)) | None => format!("'{url}' names no socket"),
        _ => format!("'{url}' names no fabric of this release"),
    };
    Check::fail("reach.url", "url", found).remedy(
        "name shm:PATH, ring:PATH, udp://HOST:PORT, tcp://HOST:PORT, tls://HOST:PORT or verbs://HOST:PORT",
    )
}

/// Checks the file at a URL's path. `found` says whether the file is a socket, and which user owns it. `own_uid` is the
/// id of this process's user.
fn socket(url: &str, path: &Path, found: Result<(bool, u32), ErrorKind>, own_uid: u32) -> Check {
    const ID: (&str, &str) = ("reach.socket", "socket");
    let place = path.display();
    match found {
        Ok((true, user)) if user == own_uid => Check::ok(ID.0, ID.1, format!("{place}, of this user")),
        // Not a failure: ring: serves other users too, and if shm: refuses this user, the connection reports it.
        Ok((true, user)) => Check::note(ID.0, ID.1, format!("{place}, of user {user}")),
        Ok((false, _)) => Check::fail(ID.0, ID.1, format!("{place} is not a socket"))
            .remedy("name the socket of a node: --pool shm:PATH"),
        Err(ErrorKind::PermissionDenied) => Check::fail(ID.0, ID.1, format!("{place} cannot be accessed"))
            .remedy("run as the user that serves there"),
        Err(_) => {
            let starts_one = match url.starts_with("ring:") {
                true => format!("farside serve --store default --listen {}", quoted(url)),
                false => format!("farside up --socket {}", quoted(&place.to_string())),
            };
            Check::fail(ID.0, ID.1, format!("{place} does not exist")).remedy(starts_one)
        }
    }
}

fn resolved(found: &[SocketAddr], took: Duration) -> Check {
    let all: Vec<String> = found.iter().map(SocketAddr::to_string).collect();
    let first = if all.len() > 1 { ", the first is used" } else { "" };
    let found = format!("{}{first}, in {}", all.join(", "), milliseconds(took));
    Check::ok("reach.resolve", "name", found)
}

const DIAL_TIME_MAX: Duration = Duration::from_secs(3);

fn dial(address: SocketAddr) -> Result<Duration, ErrorKind> {
    let since = Instant::now();
    TcpStream::connect_timeout(&address, DIAL_TIME_MAX).map(|_| since.elapsed()).map_err(|error| error.kind())
}

/// Judges the results of connecting to each address of the host. Farside connects to the first.
fn connected(url: &str, tried: &[(SocketAddr, Result<Duration, ErrorKind>)]) -> Check {
    const ID: (&str, &str) = ("reach.connect", "connection");
    let Some(&(first, outcome)) = tried.first() else {
        return Check::fail(ID.0, ID.1, "the host has no address");
    };
    let error = match outcome {
        Ok(took) => return Check::ok(ID.0, ID.1, format!("{first} in {}", milliseconds(took))),
        Err(error) => error,
    };
    let other = tried.iter().find(|(_, outcome)| outcome.is_ok());
    let scheme = url.split(':').next().unwrap_or("tcp");
    let (found, remedy) = match error {
        ErrorKind::ConnectionRefused => (
            format!("nobody listens at {first}"),
            format!("farside serve --store default --listen {scheme}://{first}   (on that host)"),
        ),
        ErrorKind::TimedOut | ErrorKind::WouldBlock => (
            format!("{first} did not respond within {} s", DIAL_TIME_MAX.as_secs()),
            format!("check whether that host is up, and let TCP port {} through its firewall", first.port()),
        ),
        ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => {
            (format!("there is no route to {first} ({error})"), format!("ip route get {}", first.ip()))
        }
        error => (format!("{first}: {error}"), format!("ip route get {}", first.ip())),
    };
    let remedy = match other {
        Some((other, _)) => format!("--pool {scheme}://{other}, where a process listens"),
        None => remedy,
    };
    Check::fail(ID.0, ID.1, found).remedy(remedy)
}

fn greeted(took: Duration, options: &Options) -> Check {
    let shown = if options.token.is_some() { ", and the token is valid" } else { "" };
    Check::ok("reach.hello", "greeting", format!("a session was opened in {}{shown}", milliseconds(took)))
}

/// Finds the step at which the greeting failed. Adds no remedy, because the error's text has one.
fn refused(error: &Error) -> Check {
    let reason = error.to_string();
    let (id, what) = match error {
        Error::Url(_) => ("reach.url", "url"),
        Error::Token(_) => ("reach.token", "token"),
        Error::Trust(_) => ("reach.tls", "TLS"),
        #[cfg(feature = "tls")]
        Error::Tls(..) => ("reach.tls", "TLS"),
        #[cfg(feature = "verbs")]
        Error::Verbs(..) => ("reach.device", "RDMA device"),
        Error::Open(_, OpenError::Refused(reason)) => step_of_refusal(reason),
        Error::Connect(ConnectError::Refused(reason)) => step_of_refusal(reason),
        Error::Connect(ConnectError::Foreign(..)) => ("reach.release", "release"),
        _ => ("reach.hello", "greeting"),
    };
    let check = Check::fail(id, what, reason);
    match error {
        Error::Open(url, OpenError::Silent) if url.starts_with("udp:") => {
            let port = url.rsplit(':').next().expect("a split text has at least one piece");
            check.because("datagrams that a firewall drops are not reported").remedy(format!(
                "let UDP port {port} through the firewalls on the path, or try tcp:// at the same host"
            ))
        }
        _ => check,
    }
}

/// Finds, by the words of a node's refusal, the step that the refusal belongs to.
fn step_of_refusal(reason: &str) -> (&'static str, &'static str) {
    let is_about = |words: &[&str]| words.iter().any(|word| reason.contains(word));
    if is_about(&["of one release", "same release"]) {
        ("reach.release", "release")
    } else if is_about(&["token", "sealed"]) {
        ("reach.token", "token")
    } else {
        ("reach.hello", "greeting")
    }
}

fn release(info: &NodeInfo, ours: &str) -> Check {
    const ID: (&str, &str) = ("reach.release", "release");
    let pid = if info.pid == 0 { String::new() } else { format!(", pid {}", info.pid) };
    let found = format!("{}{pid}, {} sessions", info.version, info.sessions);
    match info.version == ours {
        true => Check::ok(ID.0, ID.1, found),
        false => Check::note(ID.0, ID.1, format!("{found}; this is {ours}"))
            .because("they are compatible, but their features may differ"),
    }
}

/// Checks whether a request of several full-size datagrams arrives. Responses are not checked, because the node itself
/// chooses the size of their datagrams.
fn datagrams(pool: &Pool, at: SocketAddr) -> Check {
    const FULL: usize = 3;
    const REQUEST_MAX: usize = 60 << 10;
    let size = match UdpLine::connect(at, None) {
        Ok(line) => line.datagram_max(),
        Err(error) => return judged_datagrams(0, at, Err(error.to_string())),
    };
    let send = || {
        let mut request = serde_json::to_vec(&Ask::NodeInfo).expect("plain data");
        request.resize((size * FULL).min(REQUEST_MAX), b' '); // JSON may end with any number of blanks.
        let endpoint = pool.endpoint_here().map_err(|error| error.to_string())?;
        endpoint.set_call_timeout(Ask::NodeInfo.patience());
        let mut response = Vec::new();
        block_on(&endpoint, endpoint.call(NodeId(0), ServiceId::NODE, &request, &mut response))
            .map_err(|error| error.to_string())
    };
    judged_datagrams(size, at, send())
}

fn judged_datagrams(size: usize, at: SocketAddr, outcome: Result<(), String>) -> Check {
    const ID: (&str, &str) = ("reach.datagrams", "datagrams");
    match outcome {
        Ok(()) => Check::ok(ID.0, ID.1, format!("of {size} bytes arrive")),
        Err(reason) => Check::fail(ID.0, ID.1, format!("of {size} bytes do not arrive: {reason}"))
            .because("small ones do, so a host on the path drops frames of that size")
            .remedy(format!(
                // The headers of ICMP and of UDP have the same length, so equal payloads make equal packets.
                "ping -M do -s {size} {}   (shows it), then lower the interface's MTU, or use tcp://",
                at.ip()
            )),
    }
}

fn round_trip(store: &str, gets: Result<super::fabrics::Gets, String>) -> Check {
    const ID: (&str, &str) = ("reach.round_trip", "round trip");
    match gets {
        Ok(gets) => {
            let found = format!("{}, of a key that is probably absent", describe_latency(gets));
            Check { p50_us: Some(gets.p50_us), ..Check::ok(ID.0, ID.1, found) }
        }
        Err(reason) => Check::note(ID.0, ID.1, format!("store '{store}': {reason}"))
            .because("the node can be reached, but this store cannot be read"),
    }
}

fn milliseconds(took: Duration) -> String {
    format!("{:.2} ms", took.as_secs_f64() * 1e3)
}

#[cfg(test)]
mod tests {
    use super::super::check::Verdict::*;
    use super::super::tests::is;
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn urls_are_sorted_by_their_kind_of_address() {
        for (url, way) in [
            ("shm:/run/s", Address::Socket(Path::new("/run/s"))),
            ("ring:/run/s", Address::Socket(Path::new("/run/s"))),
            ("/run/s:1", Address::Socket(Path::new("/run/s:1"))),
            ("tcp://h:1", Address::Host("tcp")),
            ("verbs://h:1?gid=3", Address::Host("verbs")),
            ("udp://h", Address::Host("udp")),
            ("local:", Address::Invalid),
            ("frob://h", Address::Invalid),
            ("", Address::Invalid),
            ("shm:", Address::Invalid),
            ("ring:", Address::Invalid),
        ] {
            assert_eq!(Address::of(url), way, "{url}");
        }
        is(&no_address("local:1GiB"), Fail, "in the client's own process", "shm:PATH");
        is(&no_address("frob://h"), Fail, "'frob://h' names no fabric of this release", "shm:PATH");
        for nowhere in ["", "shm:", "ring:"] {
            is(&no_address(nowhere), Fail, &format!("'{nowhere}' names no socket"), "shm:PATH");
        }
    }

    #[test]
    fn the_file_at_a_sockets_path_is_judged_by_kind_and_user() {
        let of = |found| socket("shm:/run/s", Path::new("/run/s"), found, 7);
        is(&of(Result::Ok((true, 7))), Ok, "/run/s, of this user", "");
        is(&of(Result::Ok((true, 8))), Note, "of user 8", "");
        is(&of(Result::Ok((false, 7))), Fail, "is not a socket", "--pool shm:PATH");
        is(&of(Err(ErrorKind::NotFound)), Fail, "/run/s does not exist", "farside up --socket /run/s");
        is(&of(Err(ErrorKind::PermissionDenied)), Fail, "cannot be accessed", "as the user");
        let ring = socket("ring:/run/s", Path::new("/run/s"), Err(ErrorKind::NotFound), 7);
        is(&ring, Fail, "/run/s does not exist", "--listen ring:/run/s");
    }

    #[test]
    fn a_failed_connection_has_a_reason_and_a_working_alternative() {
        let (v6, v4) = (at("[::1]:7460"), at("127.0.0.1:7460"));
        let soon = Result::Ok(Duration::from_micros(1500));
        let of = |tried: &[_]| connected("tls://localhost", tried);
        is(&of(&[(v4, soon)]), Ok, "127.0.0.1:7460 in 1.50 ms", "");
        is(
            &of(&[(v4, Err(ErrorKind::ConnectionRefused))]),
            Fail,
            "nobody listens at 127.0.0.1:7460",
            "serve --store default --listen tls://127.0.0.1:7460",
        );
        // A name with two addresses, where the node serves at the second.
        is(
            &of(&[(v6, Err(ErrorKind::ConnectionRefused)), (v4, soon)]),
            Fail,
            "nobody listens at [::1]:7460",
            "--pool tls://127.0.0.1:7460",
        );
        is(&of(&[(v4, Err(ErrorKind::TimedOut))]), Fail, "did not respond within 3 s", "TCP port 7460");
        is(&of(&[(v4, Err(ErrorKind::NetworkUnreachable))]), Fail, "no route to", "ip route get 127.0.0.1");
        is(&of(&[(v4, Err(ErrorKind::PermissionDenied))]), Fail, "permission denied", "ip route get");
        assert_eq!(of(&[]).verdict, Fail);
    }

    #[test]
    fn a_refusal_is_reported_at_the_step_it_belongs_to() {
        let open = |reason: &str| Error::Open("udp://h:7460".into(), OpenError::Refused(reason.into()));
        for (error, id) in [
            (open("it asks for a token, and none was shown"), "reach.token"),
            (open("it accepts no sealed packets, since it serves without --tokens"), "reach.token"),
            (open("the client speaks version 9; use a node and a client of one release"), "reach.release"),
            (open("this node has 1024 sessions and grants no more"), "reach.hello"),
            (Error::Token("too long".into()), "reach.token"),
            (Error::Trust("name a file".into()), "reach.tls"),
            (Error::Url("no host".into()), "reach.url"),
            (Error::Connect(ConnectError::Stopped(7)), "reach.hello"),
            (Error::Connect(ConnectError::Refused("no more".into())), "reach.hello"),
            (Error::Connect(ConnectError::Foreign("/s".into(), "x".into())), "reach.release"),
        ] {
            let check = refused(&error);
            assert_eq!((check.id, check.verdict), (id, Fail), "{check:?}");
            assert_eq!(check.found, error.to_string());
        }
        let silent = |url: &str| refused(&Error::Open(url.into(), OpenError::Silent));
        is(&silent("udp://h:7461"), Fail, "no node answered", "let UDP port 7461 through");
        is(&silent("tcp://h:7461"), Fail, "no node answered", "");
    }

    #[test]
    fn datagrams_dropped_for_their_size_are_reported_with_the_size() {
        is(&judged_datagrams(1452, at("10.0.0.7:7460"), Result::Ok(())), Ok, "of 1452 bytes arrive", "");
        is(
            &judged_datagrams(1452, at("10.0.0.7:7460"), Err("no answer".into())),
            Fail,
            "of 1452 bytes do not arrive: no answer",
            "ping -M do -s 1452 10.0.0.7",
        );
    }
}
