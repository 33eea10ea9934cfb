//! `tls`: creates certificates, with which clients verify that they reach the right node.
//!
//! The certificates are self-signed, so a client needs a copy of the node's certificate to trust it.

use super::node::quoted;
use super::{Done, Failure};
use farside_fabrics::tcp::tls::HostName;
use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, KeyPair, KeyUsagePurpose,
};
use std::io::Write;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Create certificates, with which clients verify that they reach the right node.
#[derive(clap::Args)]
pub(super) struct Tls {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Create a certificate and its key, for 'farside serve --listen tls://...'
    New {
        /// Name or address of the node's host, as it stands in the clients' URLs. May be given several times
        #[arg(long, value_name = "NAME", required = true)]
        host: Vec<String>,
        /// Folder for cert.pem and key.pem, neither of which may exist yet
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Number of days for which the certificate is valid
        #[arg(long, value_name = "N", default_value_t = DAYS, value_parser = clap::value_parser!(u32).range(1..=36500))]
        days: u32,
    },
}

const DAYS: u32 = 3650;
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

impl Tls {
    pub(super) fn run(self) -> Done {
        let Action::New { host, out, days } = self.action;
        let made = Certificate::new(&host, days).map_err(Failure::Error)?;
        std::fs::create_dir_all(&out).map_err(|error| {
            Failure::Error(format!("could not create {}: {error}; name another folder", out.display()))
        })?;
        let (certificate, key) = (out.join("cert.pem"), out.join("key.pem"));
        made.write(&certificate, &key).map_err(Failure::Error)?;
        let [cert, key] = [certificate, key].map(|path| quoted(&path.display().to_string()));
        let (url, serves) = url_of(&host[0]);
        print_line!("A certificate for {}, valid for {days} days: {cert}; its key: {key}", host.join(", "));
        print_line!("Serve with both:");
        print_line!("  farside serve --store default --listen {serves} --tls-cert {cert} --tls-key {key}");
        print_line!("Clients trust the certificate, or a copy of it; the key stays where the node is:");
        print_line!("  farside kv put greeting hello --pool {url} --tls-ca {cert}");
        Ok(())
    }
}

/// Returns the URL at which clients reach a node on `host`, and the arguments of `serve --listen`. These include
/// `--tokens` unless the host is a loopback address.
fn url_of(host: &str) -> (String, &'static str) {
    let bare = host.trim_matches(['[', ']']);
    let url = if bare.contains(':') { format!("tls://[{bare}]:7460") } else { format!("tls://{bare}:7460") };
    let address = if bare == "localhost" { "127.0.0.1" } else { bare }.parse::<IpAddr>();
    let serves = match address {
        Ok(IpAddr::V4(address)) if address.is_loopback() => "tls://127.0.0.1:7460",
        Ok(IpAddr::V6(address)) if address.is_loopback() => "tls://[::1]:7460",
        _ => "tls://0.0.0.0:7460 --tokens tokens.toml",
    };
    (url, serves)
}

/// A self-signed certificate and its private key.
pub(super) struct Certificate {
    /// The certificate, in PEM.
    pub(super) text: String,
    /// The private key, in PEM. It is secret.
    key: String,
}

impl Certificate {
    /// Creates a certificate for `hosts` that is valid for `days` days, with a new key.
    ///
    /// # Errors
    /// An element of `hosts` is neither a name nor an address of a host; the message names the element.
    pub(super) fn new(hosts: &[String], days: u32) -> Result<Certificate, String> {
        let bare: Vec<String> = hosts.iter().map(|host| host.trim_matches(['[', ']']).to_owned()).collect();
        for host in &bare {
            HostName::parse(host)
                .map_err(|reason| format!("{reason}: give --host without scheme and port"))?;
        }
        let impossible =
            |error: rcgen::Error| format!("could not create a certificate for these hosts: {error}");
        let mut params = CertificateParams::new(bare.clone()).map_err(impossible)?;
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, format!("farside node {}", bare[0]));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = now.map_err(|_| "this machine's clock shows a time before 1970: set it first")?;
        let epoch = rcgen::date_time_ymd(1970, 1, 1);
        params.not_before = epoch + now.saturating_sub(DAY); // A client's clock may be behind.
        params.not_after = epoch + now + DAY * days;
        let key = KeyPair::generate().map_err(impossible)?;
        let text = params.self_signed(&key).map_err(impossible)?.pem();
        Ok(Certificate { text, key: key.serialize_pem() })
    }

    /// Writes the certificate and the key to new files. No other user may read the key.
    ///
    /// # Errors
    /// One of the two files exists already, or cannot be created. Then neither file is created.
    pub(super) fn write(&self, certificate: &Path, key: &Path) -> Result<(), String> {
        write_new(key, 0o600, &self.key)?;
        write_new(certificate, 0o644, &self.text).inspect_err(|_| {
            let _left_behind = std::fs::remove_file(key);
        })
    }
}

fn write_new(path: &Path, mode: u32, text: &str) -> Result<(), String> {
    let file = std::fs::File::options().write(true).create_new(true).mode(mode).open(path);
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|error| format!("could not write {}: {error}; name another folder", path.display()))
}
