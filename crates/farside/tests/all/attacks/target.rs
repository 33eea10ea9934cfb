//! A node under attack, and a well-behaved client that must not be affected.

use crate::support::{self, until};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;
use tempfile::TempDir;

/// Content of the witness's values. No attacker may see it.
pub(crate) const SECRET: &[u8; 16] = b"another tenant's";

/// A node that serves over every carrier, with a store `default` for attackers and one for the witness.
pub(crate) struct Target {
    _folder: TempDir,
    pub(crate) node: support::Node,
    urls: BTreeMap<String, String>,
    pub(crate) admin: SocketAddr,
    /// Options with which well-behaved clients connect.
    pub(crate) options: farside::Options,
}

impl Target {
    pub(crate) fn start() -> Target {
        Target::within(|command| command)
    }

    pub(crate) fn within(wrap: impl FnOnce(std::process::Command) -> std::process::Command) -> Target {
        let folder = tempfile::tempdir().expect("a folder");
        let out = folder.path().to_str().expect("UTF-8");
        support::farside(["tls", "new", "--host", "127.0.0.1", "--out", out]).done();
        let (cert, key) = (format!("{out}/cert.pem"), format!("{out}/key.pem"));
        let tls_ca = Some(std::fs::read_to_string(&cert).expect("the command wrote the file"));
        let ring = format!("ring:{out}/ring");
        let mut arguments = vec!["--memory", "96MiB", "--store", "default", "--quota", "16MiB"];
        for url in ["udp://127.0.0.1:0", "tcp://127.0.0.1:0", "tls://127.0.0.1:0", &ring] {
            arguments.extend(["--listen", url]);
        }
        // Tests that take an RDMA device run only where this variable names one.
        let verbs = std::env::var("FARSIDE_VERBS_DEVICE")
            .map(|device| format!("verbs://{device}:0?host=127.0.0.1"))
            .ok();
        arguments.extend(verbs.iter().flat_map(|url| ["--listen", url]));
        arguments.extend(["--tls-cert", &cert, "--tls-key", &key, "--admin", "127.0.0.1:0"]);
        let node = support::Node::within(wrap, &arguments);
        let mut urls = BTreeMap::new();
        let admin = loop {
            let line = node.process.line();
            if let Some((_, url)) = line.split_once("serves at ") {
                let carrier = url.split(':').next().expect("a scheme");
                urls.insert(carrier.to_owned(), url.to_owned());
            } else if let Some((_, rest)) = line.split_once("http://") {
                break rest.split('/').next().and_then(|at| at.parse().ok()).expect("an address");
            }
        };
        node.run(["store", "create", "witness", "--quota", "24MiB", "--items", "2000"]).done();
        let options = farside::Options { tls_ca, ..farside::Options::default() };
        Target { _folder: folder, node, urls, admin, options }
    }

    /// Returns the url of the engine for a carrier.
    pub(crate) fn url(&self, carrier: &str) -> &str {
        &self.urls[carrier]
    }

    /// Fetches a path from the admin endpoint; returns the body.
    pub(crate) fn http(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(self.admin).expect("the node listens");
        stream.set_read_timeout(Some(support::PATIENCE)).expect("a time");
        write!(stream, "GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")
            .expect("the node reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("a response");
        answer.split_once("\r\n\r\n").expect("a head and a body").1.to_owned()
    }

    /// Returns the value of one of the node's metrics.
    #[track_caller]
    pub(crate) fn count(&self, name: &str) -> u64 {
        let metrics = self.http("/metrics");
        let line = metrics.lines().find_map(|line| line.strip_prefix(&format!("farside_{name} ")));
        let value = line.unwrap_or_else(|| panic!("no metric {name}: {metrics}"));
        value.trim().parse::<f64>().expect("a number") as u64
    }

    /// Returns the value of a metric once it stops growing. Engines publish their counters twice a second, and when
    /// they become idle.
    #[track_caller]
    pub(crate) fn settled(&self, name: &str) -> u64 {
        let mut last = self.count(name);
        until(&format!("{name} stops growing"), || {
            std::thread::sleep(Duration::from_millis(700));
            let before = std::mem::replace(&mut last, self.count(name));
            before == last
        });
        last
    }

    /// Waits until a metric is at least `least`.
    #[track_caller]
    pub(crate) fn reaches(&self, name: &str, least: u64) {
        until(&format!("{name} is {least} or more"), || self.count(name) >= least);
    }

    /// Returns how a store's memory is used, as `farside kv stat --json` prints it.
    #[track_caller]
    pub(crate) fn stat(&self, store: &str) -> serde_json::Value {
        self.node.run(["kv", "stat", "--json", "--store", store]).done().json()
    }

    pub(crate) fn info(&self) -> serde_json::Value {
        self.node.run(["info", "--json"]).done().json()
    }

    /// Returns the resident memory of the node's process, in KiB.
    pub(crate) fn resident_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.node.process.pid()))
            .expect("the process runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a line");
        line.trim().trim_end_matches("kB").trim().parse().expect("a number")
    }

    /// Starts a witness over a carrier: a client whose data must survive.
    pub(crate) fn witness(&self, carrier: &str) -> Witness {
        let pool = farside::connect_with(self.url(carrier), &self.options).expect("the node serves");
        let witness = Witness { client: pool.open("witness").expect("a store") };
        for n in 0..Witness::ITEMS {
            witness.client.put(n.to_le_bytes(), value_of(n)).wait().expect("stored");
        }
        witness
    }

    /// Asserts that the node serves, and holds no more sessions and descriptors than before.
    #[track_caller]
    pub(crate) fn assert_as_before(&self, before: Before) {
        until("no extra session is left", || self.info()["sessions"].as_u64() <= Some(before.sessions));
        until("no extra descriptor is left", || self.node.descriptors() <= before.descriptors);
        assert!(!self.node.process.log().contains("panicked"), "{}", self.node.process.log());
    }

    pub(crate) fn now(&self) -> Before {
        Before {
            sessions: self.info()["sessions"].as_u64().expect("a number"),
            descriptors: self.node.descriptors(),
        }
    }
}

/// Numbers of sessions and descriptors that a node holds at one time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Before {
    sessions: u64,
    descriptors: usize,
}

/// A well-behaved client with its own store, which no attack may affect.
pub(crate) struct Witness {
    client: farside::Client,
}

fn value_of(n: u64) -> Vec<u8> {
    let mut value = SECRET.repeat(4);
    value.extend_from_slice(&n.to_le_bytes());
    value
}

impl Witness {
    const ITEMS: u64 = 100;

    /// Asserts that this client finds all the data that it stored, and can put.
    #[track_caller]
    pub(crate) fn assert_well(&self) {
        for n in 0..Witness::ITEMS {
            let got = self.client.get(n.to_le_bytes()).wait().expect("read");
            assert_eq!(got.expect("present").value, value_of(n), "item {n}");
        }
        self.client.put(0_u64.to_le_bytes(), value_of(0)).wait().expect("stored");
    }

    /// Runs gets for the time `while_`; returns the number of gets.
    pub(crate) fn gets_in(&self, while_: Duration) -> u64 {
        let since = std::time::Instant::now();
        let mut gets = 0;
        while since.elapsed() < while_ {
            self.client.get((gets % Witness::ITEMS).to_le_bytes()).wait().expect("read");
            gets += 1;
        }
        gets
    }
}

/// Whether bytes contain the first or the second half of [`SECRET`], and therefore come from another tenant.
pub(crate) fn contains_secret(bytes: &[u8]) -> bool {
    bytes.windows(SECRET.len() / 2).any(|window| window == &SECRET[..8] || window == &SECRET[8..])
}
