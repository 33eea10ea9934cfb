//! The nodes of a pool from etcd: one key below a prefix for each node, whose value is the node's url or its entry in
//! TOML.
//!
//! The list is read once, when a program connects. etcd is asked over its JSON gateway, a POST over plain HTTP
//! ([0028](../../../../docs/decisions/0028-etcd-by-its-json-gateway.md)).
//!
//! Invariant: a running client never needs etcd. A new client needs etcd or the list that was read last on this host.
//! Invariant: the bytes of an answer, and of the file of the last list, are untrusted.

use super::Options;
use super::nodes::{self, Entry};
use crate::config::{read_private, state_folder};
use crate::error::Error;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use farside_fabrics::nodes::NODES_MAX;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Port of etcd, for a url that names none.
const PORT: u16 = 2379;
/// Time in which an endpoint must answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// Size limit of an answer, in bytes. A list of nodes is far smaller.
const ANSWER_MAX: u64 = 1 << 20;

/// A url such as `etcd://HOST:PORT,HOST:PORT/PREFIX`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Source {
    /// Endpoints, each with its port. Never empty.
    endpoints: Vec<String>,
    /// Prefix of the keys, which begins and ends with a slash.
    prefix: String,
}

/// A key and its value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pair {
    key: String,
    value: String,
}

/// The last list, as a file holds it.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    /// Url of the pool.
    pool: String,
    nodes: Vec<Pair>,
}

/// Returns the url and the options of each node that etcd lists for the url `pool`. If no endpoint answers, returns the
/// list that was read last, and warns.
///
/// # Errors
/// The url or a value is invalid, no node is listed, or etcd does not answer and there is no last list.
pub(super) fn read(pool: &str, options: &Options) -> Result<Vec<(String, Options)>, Error> {
    let source = Source::parse(pool).map_err(Error::Url)?;
    let file = state_folder().map(|folder| folder.join("pools").join(name_of(pool)));
    match source.ask() {
        Ok(pairs) => {
            let nodes = source.nodes(&pairs, options)?;
            let kept = file.map(|file| keep(&file, Kept { pool: pool.to_owned(), nodes: pairs }));
            if let Some(Err(error)) = kept {
                tracing::warn!("the nodes of '{pool}' could not be kept for a time without etcd: {error}");
            }
            Ok(nodes)
        }
        Err(reason) => {
            let last = file.as_deref().ok_or_else(|| "neither XDG_STATE_HOME nor HOME is set".to_owned());
            match last.and_then(|file| kept(file, pool)) {
                Ok(pairs) => {
                    tracing::warn!("{reason}; using the {} nodes that it listed last", pairs.len());
                    source.nodes(&pairs, options)
                }
                Err(missing) => Err(Error::Url(format!(
                    "{reason}, and no earlier list of nodes can be used ({missing}): check that etcd runs and that \
                     '{pool}' names it, or name the nodes themselves in --pool"
                ))),
            }
        }
    }
}

impl Source {
    fn parse(pool: &str) -> Result<Source, String> {
        let wrong =
            |why: &str| format!("'{pool}' {why}: write it like etcd://HOST:{PORT},HOST:{PORT}/PREFIX");
        let rest = pool.strip_prefix("etcd://").ok_or_else(|| wrong("has no // after 'etcd:'"))?;
        let (hosts, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let prefix = prefix.trim_matches('/');
        if prefix.is_empty() {
            return Err(wrong("names no prefix of keys"));
        }
        let with_port = |host: &str| match host {
            "" => Err(wrong("has an empty host")),
            host if super::has_port(host) => Ok(host.to_owned()),
            host => Ok(format!("{host}:{PORT}")),
        };
        let endpoints = hosts.split(',').map(with_port).collect::<Result<_, _>>()?;
        Ok(Source { endpoints, prefix: format!("/{prefix}/") })
    }

    /// Asks all endpoints at the same time, and returns the first list that arrives.
    ///
    /// # Errors
    /// No endpoint has answered with a list in time. The text names each with its reason.
    fn ask(&self) -> Result<Vec<Pair>, String> {
        let (sender, receiver) = mpsc::channel();
        for endpoint in self.endpoints.iter().cloned() {
            let (sender, request) = (sender.clone(), request(&endpoint, &self.prefix));
            // A thread that no longer matters ends by itself.
            let asks = move || {
                let listed = exchange(&endpoint, &request)
                    .map_err(|error| error.to_string())
                    .and_then(|answer| listed(&answer));
                let _unheard = sender.send((endpoint, listed));
            };
            let started = std::thread::Builder::new().name("etcd".into()).spawn(asks);
            started.map_err(|error| format!("no thread could be started to ask etcd: {error}"))?;
        }
        drop(sender);
        // The resolution of a name has no limit of its own.
        let deadline = Instant::now() + 2 * PATIENCE;
        let mut reasons: Vec<String> = Vec::new();
        while reasons.len() < self.endpoints.len() {
            match receiver.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok((_, Ok(pairs))) => return Ok(pairs),
                Ok((endpoint, Err(reason))) => reasons.push(format!("{endpoint}: {reason}")),
                Err(_) => {
                    reasons.push("the others: no answer in time".into());
                    break;
                }
            }
        }
        Err(format!("etcd does not answer ({})", reasons.join("; ")))
    }

    /// Converts what etcd lists to nodes.
    ///
    /// # Errors
    /// A value is invalid, or there are none or too many. The text names the key.
    fn nodes(&self, pairs: &[Pair], options: &Options) -> Result<Vec<(String, Options)>, Error> {
        if pairs.is_empty() {
            return Err(Error::Url(format!(
                "etcd has no key below '{0}': add a node by 'etcdctl put {0}NAME URL'",
                self.prefix
            )));
        }
        if pairs.len() > NODES_MAX {
            return Err(Error::Url(format!(
                "etcd has more than {NODES_MAX} keys below '{}': a pool has at most {NODES_MAX} nodes",
                self.prefix
            )));
        }
        pairs.iter().map(|pair| pair.node(options)).collect()
    }
}

impl Pair {
    fn node(&self, options: &Options) -> Result<(String, Options), Error> {
        let wrong = |why: &str| {
            Error::Url(format!(
                "the value of the key '{}' in etcd {why}: put a node's url, or TOML like url = \"tls://HOST:7460\"",
                self.key
            ))
        };
        let value = self.value.trim();
        let entry = match toml::from_str::<toml::Table>(value) {
            Ok(table) if !table.is_empty() => table
                .try_into::<Entry>()
                .map_err(|error| wrong(&format!("is invalid ({})", error.message())))?,
            _ => Entry { url: value.to_owned(), token_file: None, tls_ca: None },
        };
        if entry.url.is_empty() || entry.url.contains(|c: char| c.is_whitespace() || c.is_control()) {
            return Err(wrong("is no url"));
        }
        if ["local:", "etcd:", "@"].iter().any(|prefix| entry.url.starts_with(prefix)) {
            return Err(wrong("is not the url of a node that others can reach"));
        }
        let files = [&entry.token_file, &entry.tls_ca];
        if files.iter().any(|file| file.as_ref().is_some_and(|path| path.is_relative())) {
            return Err(wrong("names a file by a relative path"));
        }
        nodes::with_files(entry, Path::new(""), options).map_err(|error| match error {
            Error::Token(why) => Error::Token(format!("the key '{}' in etcd: {why}", self.key)),
            Error::Trust(why) => Error::Trust(format!("the key '{}' in etcd: {why}", self.key)),
            other => other,
        })
    }
}

/// The request for all keys that begin with `prefix`, in their order.
///
/// HTTP/1.0, so that the server sends no chunks, and closes the connection at the end of its answer.
fn request(endpoint: &str, prefix: &str) -> String {
    // The end of the range is the first key after all those with the prefix, which ends with a slash.
    let end = format!("{}0", prefix.strip_suffix('/').unwrap_or(prefix));
    let body = serde_json::json!({
        "key": BASE64.encode(prefix),
        "range_end": BASE64.encode(end),
        "limit": NODES_MAX + 1,
    })
    .to_string();
    format!(
        "POST /v3/kv/range HTTP/1.0\r\nHost: {endpoint}\r\nContent-Type: application/json\r\nContent-Length: \
         {}\r\n\r\n{body}",
        body.len()
    )
}

/// Sends a request, and returns all bytes of the answer.
fn exchange(endpoint: &str, request: &str) -> io::Result<Vec<u8>> {
    let deadline = Instant::now() + PATIENCE;
    let left = || match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::Error::from(io::ErrorKind::TimedOut)),
        left => Ok(left),
    };
    let mut failed = io::Error::other("the host has no address");
    for address in endpoint.to_socket_addrs()? {
        let mut stream = match left().and_then(|left| TcpStream::connect_timeout(&address, left)) {
            Ok(stream) => stream,
            Err(error) => {
                failed = error;
                continue;
            }
        };
        stream.set_write_timeout(Some(left()?))?;
        stream.write_all(request.as_bytes())?;
        let (mut answer, mut part) = (Vec::new(), [0; 4096]);
        loop {
            stream.set_read_timeout(Some(left()?))?;
            match stream.read(&mut part)? {
                0 => return Ok(answer),
                len => answer.extend_from_slice(&part[..len]),
            }
            if answer.len() as u64 > ANSWER_MAX {
                return Err(io::Error::other("the answer is too long"));
            }
        }
    }
    Err(failed)
}

/// Parses an answer: the keys with their values.
///
/// # Errors
/// The answer is not that of etcd's gateway, or an error.
fn listed(answer: &[u8]) -> Result<Vec<Pair>, String> {
    #[derive(Deserialize)]
    struct Listed {
        /// In every answer of etcd.
        #[serde(rename = "header")]
        _header: serde::de::IgnoredAny,
        /// Absent if there is none.
        #[serde(default)]
        kvs: Vec<Found>,
    }
    #[derive(Deserialize)]
    struct Found {
        key: String,
        #[serde(default)]
        value: String,
    }
    let no_etcd = || "its answer is not that of etcd's JSON gateway".to_owned();
    let end = answer.windows(4).position(|part| part == b"\r\n\r\n").ok_or_else(no_etcd)?;
    let head = std::str::from_utf8(&answer[..end]).map_err(|_| no_etcd())?;
    let body = &answer[end + 4..];
    let status = head.lines().next().and_then(|line| {
        let (version, rest) = line.split_once(' ')?;
        version.starts_with("HTTP/1.").then(|| rest.trim())
    });
    let status = status.ok_or_else(no_etcd)?;
    if !status.starts_with("200") {
        let body = String::from_utf8_lossy(&body[..body.len().min(200)]);
        return Err(format!("it refused the request ({status}: {})", body.trim().escape_debug()));
    }
    let listed: Listed = serde_json::from_slice(body).map_err(|_| no_etcd())?;
    let text = |base64: &str| {
        let bytes = BASE64.decode(base64).map_err(|_| no_etcd())?;
        Ok::<_, String>(String::from_utf8_lossy(&bytes).into_owned())
    };
    listed.kvs.iter().map(|found| Ok(Pair { key: text(&found.key)?, value: text(&found.value)? })).collect()
}

/// Name of the file that keeps the last list of a pool.
fn name_of(pool: &str) -> String {
    format!("{:016x}.json", crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, pool.as_bytes()))
}

/// Replaces the file at once, so that a reader finds the last list or this one.
fn keep(file: &Path, kept: Kept) -> io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("/"));
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let drawn = getrandom::u64().expect("the system has random bytes");
    let new: PathBuf = folder.join(format!("new-{drawn:016x}"));
    let text = serde_json::to_vec(&kept).expect("plain data");
    let mut opened = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    let written = opened.write_all(&text).and_then(|()| std::fs::rename(&new, file));
    if written.is_err() {
        let _gone = std::fs::remove_file(&new);
    }
    written
}

/// Reads the last list of `pool`.
///
/// # Errors
/// There is none, it is invalid, or it is that of another pool.
fn kept(file: &Path, pool: &str) -> Result<Vec<Pair>, String> {
    let text = read_private(file)?;
    let kept = serde_json::from_str::<Kept>(&text).ok().filter(|kept| kept.pool == pool);
    kept.map(|kept| kept.nodes).ok_or_else(|| format!("{} is not its list of nodes", file.display()))
}

#[cfg(test)]
#[path = "../../../remote/tests/support/fuzz.rs"]
mod fuzz;

#[cfg(test)]
mod tests {
    use super::fuzz::{self, Change, Executions};
    use super::*;

    fn pair(key: &str, value: &str) -> Pair {
        Pair { key: key.into(), value: value.into() }
    }

    #[test]
    fn a_url_names_endpoints_and_a_prefix() {
        let parsed = Source::parse("etcd://a,b:1,[::1]/farside/prod/").expect("a valid url");
        assert_eq!(parsed.endpoints, ["a:2379", "b:1", "[::1]:2379"]);
        assert_eq!(parsed.prefix, "/farside/prod/");
        for (bad, reason) in [
            ("etcd:a/p", "no // after"),
            ("etcd://a", "names no prefix"),
            ("etcd://a/", "names no prefix"),
            ("etcd:///p", "has an empty host"),
            ("etcd://a,/p", "has an empty host"),
        ] {
            let error = Source::parse(bad).expect_err(bad);
            assert!(error.contains(reason) && error.contains("write it like etcd://HOST:2379"), "{error}");
        }
    }

    #[test]
    fn an_invalid_value_is_refused_with_its_key() {
        let source = Source::parse("etcd://a/p").expect("a valid url");
        let own = Options { token: Some("the client's".into()), ..Options::default() };
        let nodes = source
            .nodes(&[pair("/p/1", "shm:/a=b\n"), pair("/p/2", "url = 'tls://b'")], &own)
            .expect("valid");
        assert_eq!(nodes.iter().map(|(url, _)| url.as_str()).collect::<Vec<_>>(), ["shm:/a=b", "tls://b"]);
        assert!(nodes.iter().all(|(_, options)| options.token.as_deref() == Some("the client's")));
        for (value, reason) in [
            ("", "is no url"),
            ("two words", "is no url"),
            ("url = ''", "is no url"),
            ("url = 'shm:/a'\ntoken = 'x'", "unknown field `token`"),
            ("token_file = '/x'", "missing field `url`"),
            ("local:", "not the url of a node that others can reach"),
            ("etcd://b/p", "not the url of a node that others can reach"),
            ("@nodes.toml", "not the url of a node that others can reach"),
            ("url = 'shm:/a'\ntoken_file = 'x'", "by a relative path"),
            ("url = 'shm:/a'\ntoken_file = '/nowhere/x'", "could not read /nowhere/x"),
        ] {
            let error = source.nodes(&[pair("/p/7", value)], &own).expect_err(value).to_string();
            assert!(error.contains(reason) && error.contains("the key '/p/7' in etcd"), "{error}");
        }
        let error = source.nodes(&[], &own).expect_err("no key").to_string();
        assert!(error.contains("etcdctl put /p/NAME URL"), "{error}");
        let many = vec![pair("/p/1", "shm:/a"); NODES_MAX + 1];
        assert!(source.nodes(&many, &own).is_err());
    }

    #[test]
    fn a_last_list_is_used_for_its_own_pool_only() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("pools/x.json");
        let nodes = vec![pair("/p/1", "shm:/a")];
        assert!(kept(&file, "etcd://a/p").is_err(), "there is none");
        for _ in 0..2 {
            keep(&file, Kept { pool: "etcd://a/p".into(), nodes: nodes.clone() }).expect("a new file");
        }
        assert_eq!(kept(&file, "etcd://a/p"), Ok(nodes));
        assert!(kept(&file, "etcd://a/q").is_err());
        std::fs::write(&file, "{").expect("a file");
        assert!(kept(&file, "etcd://a/p").expect_err("cut").contains("is not its list"));
        let left = std::fs::read_dir(folder.path().join("pools")).expect("a folder").count();
        assert_eq!(left, 1, "no other file is left");
    }

    #[test]
    fn an_answer_of_no_etcd_is_refused() {
        let answer = "HTTP/1.0 200 OK\r\nA: b\r\n\r\n{\"header\":{},\"kvs\":[{\"key\":\"L3A=\",\"value\":\"eA==\"},\
                      {\"key\":\"L3E=\"}],\"count\":\"2\"}";
        assert_eq!(listed(answer.as_bytes()), Ok(vec![pair("/p", "x"), pair("/q", "")]));
        assert_eq!(listed(b"HTTP/1.0 200 OK\r\n\r\n{\"header\":{}}"), Ok(vec![]));
        for bad in [
            "",
            "HTTP/1.0 200 OK",
            "SSH-2.0\r\n\r\n{}",
            "HTTP/1.0 200 OK\r\n\r\n[]",
            "HTTP/1.0 200 OK\r\n\r\n{}",
            &answer[..90],
        ] {
            assert!(listed(bad.as_bytes()).expect_err(bad).contains("JSON gateway"), "{bad}");
        }
        let refused =
            listed(b"HTTP/1.1 401 Unauthorized\r\n\r\n{\"error\":\"no user\"}").expect_err("refused");
        assert!(refused.contains("401 Unauthorized") && refused.contains("no user"), "{refused}");
    }

    /// Any answer is refused, or parsed into keys and values.
    #[test]
    fn fuzz_answers_of_etcd() {
        let executions = Executions::of("answers of etcd");
        let source = Source::parse("etcd://a/p").expect("a valid url");
        let inputs = bolero::check!().with_test_time(fuzz::budget()).with_type().cloned();
        inputs.for_each(|(key, value, changes): (String, String, Vec<Change>)| {
            executions.one_more();
            let kvs = serde_json::json!({
                "header": {},
                "kvs": [{ "key": BASE64.encode(&key), "value": BASE64.encode(&value) }]
            });
            let mut answer = format!("HTTP/1.0 200 OK\r\nServer: etcd\r\n\r\n{kvs}").into_bytes();
            assert_eq!(listed(&answer), Ok(vec![pair(&key, &value)]));
            fuzz::change(&mut answer, &changes);
            if let Ok(pairs) = listed(&answer)
                && let Ok(nodes) = source.nodes(&pairs, &Options::default())
            {
                assert!(nodes.iter().all(|(url, _)| !url.is_empty()));
            }
        });
    }
}
