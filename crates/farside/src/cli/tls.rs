//! `tls`: certificates, by which clients know that a node is the one that they mean.
//!
//! Nobody signs them but their own key, so a client that is to trust one is given that very certificate.

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

/// Make certificates, by which clients know that a node is the one that they mean.
#[derive(clap::Args)]
pub(super) struct Tls {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Make a certificate and its key, for 'farside serve --listen tls://...'
    New {
        /// A name or an address of the node's host, as clients have it in their url. May be given several times
        #[arg(long, value_name = "NAME", required = true)]
        host: Vec<String>,
        /// The folder for cert.pem and key.pem, which must not be there yet
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// For how many days it is valid
        #[arg(long, value_name = "N", default_value_t = DAYS, value_parser = clap::value_parser!(u32).range(1..=36500))]
        days: u32,
    },
}

const DAYS: u32 = 3650;
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

impl Tls {
    pub(super) fn run(self) -> Done {
        let Action::New { host, out, days } = self.action;
        let made = Certificate::new(&host, days).map_err(Failure::Told)?;
        std::fs::create_dir_all(&out).map_err(|error| {
            Failure::Told(format!("could not make {}: {error}; name another folder", out.display()))
        })?;
        let (certificate, key) = (out.join("cert.pem"), out.join("key.pem"));
        made.write(&certificate, &key).map_err(Failure::Told)?;
        let [cert, key] = [certificate, key].map(|path| quoted(&path.display().to_string()));
        let (url, serves) = url_of(&host[0]);
        tell!("A certificate for {}, valid for {days} days: {cert}; its key: {key}", host.join(", "));
        tell!("Serve with both:");
        tell!("  farside serve --store default --listen {serves} --tls-cert {cert} --tls-key {key}");
        tell!("Clients trust the certificate, or a copy of it; the key stays where the node is:");
        tell!("  farside kv put greeting hello --pool {url} --tls-ca {cert}");
        Ok(())
    }
}

/// Where clients look for a node of that host, and where it listens; off loopback it takes tokens.
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

/// A certificate that its own key has signed.
pub(super) struct Certificate {
    /// In PEM.
    pub(super) text: String,
    /// In PEM. A secret.
    key: String,
}

impl Certificate {
    /// A fresh one for these hosts.
    ///
    /// # Errors
    /// One of them is none; names it.
    pub(super) fn new(hosts: &[String], days: u32) -> Result<Certificate, String> {
        let bare: Vec<String> = hosts.iter().map(|host| host.trim_matches(['[', ']']).to_owned()).collect();
        for host in &bare {
            HostName::parse(host)
                .map_err(|reason| format!("{reason}: give --host without scheme and port"))?;
        }
        let impossible = |error: rcgen::Error| format!("no certificate can be made for these hosts: {error}");
        let mut params = CertificateParams::new(bare.clone()).map_err(impossible)?;
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, format!("farside node {}", bare[0]));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now = now.map_err(|_| "this machine's clock says a time before 1970: set it first")?;
        let epoch = rcgen::date_time_ymd(1970, 1, 1);
        params.not_before = epoch + now.saturating_sub(DAY); // Clocks differ.
        params.not_after = epoch + now + DAY * days;
        let key = KeyPair::generate().map_err(impossible)?;
        let text = params.self_signed(&key).map_err(impossible)?.pem();
        Ok(Certificate { text, key: key.serialize_pem() })
    }

    /// Writes both to new files; nobody else may read the key.
    ///
    /// # Errors
    /// One of them is there, or cannot be made; then neither was made.
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
