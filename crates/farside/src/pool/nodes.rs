//! The nodes of a pool: a list of urls, a TOML file, or keys in etcd.
//!
//! Invariant: every node that a pool's url names is either in the pool, or the reason of an error.

use super::{Options, etcd};
use crate::config::{read_text, read_token};
use crate::error::Error;
use farside_fabrics::nodes::NODES_MAX;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Stands for a comma within a node's url.
const COMMA: &str = "%2C";

/// A file of nodes.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    node: Vec<Entry>,
}

/// A node in the file. Its paths are relative to the file's folder.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Entry {
    pub(super) url: String,
    /// File of the token for this node, in place of the client's.
    pub(super) token_file: Option<PathBuf>,
    /// File of the trusted certificates for this node, in place of the client's.
    pub(super) tls_ca: Option<PathBuf>,
}

/// Returns the url and the options of each node that `pool` names: urls separated by commas, `@` and the path of a TOML
/// file, or an `etcd:` url. Never empty.
///
/// # Errors
/// A url is empty, the list is too long, two urls are equal, or the file or etcd's list cannot be read or is invalid.
pub(super) fn parse(pool: &str, options: &Options) -> Result<Vec<(String, Options)>, Error> {
    let nodes = match pool.strip_prefix('@') {
        Some(path) => read(Path::new(path), options)?,
        None if pool.starts_with("etcd:") => etcd::read(pool, options)?,
        None => pool.split(',').map(|url| (url.replace(COMMA, ","), options.clone())).collect(),
    };
    let mut seen = BTreeSet::new();
    let twice = nodes.iter().map(|(url, _)| url).find(|&url| !seen.insert(url));
    let wrong = if nodes.is_empty() {
        format!("'{pool}' names no node: add a [[node]] with a url")
    } else if nodes.len() == 1 {
        return Ok(nodes);
    } else if nodes.iter().any(|(url, _)| url.is_empty()) {
        format!("'{pool}' has an empty url: remove the extra comma")
    } else if nodes.len() > NODES_MAX {
        format!("'{pool}' names {} nodes: a pool has at most {NODES_MAX}", nodes.len())
    } else if nodes.iter().any(|(url, _)| url.starts_with("local:")) {
        format!(
            "'{pool}' has a 'local:' node among others: such a node has no other clients; use it alone, or 'farside \
             up --nodes'"
        )
    } else if let Some(url) = twice {
        format!("'{pool}' names '{url}' twice: name each node once")
    } else {
        return Ok(nodes);
    };
    Err(Error::Url(wrong))
}

/// Joins the urls of nodes to a list, in the form that `--pool` takes.
pub fn join<'a>(urls: impl Iterator<Item = &'a str>) -> String {
    urls.map(|url| url.replace(',', COMMA)).collect::<Vec<_>>().join(",")
}

fn read(path: &Path, options: &Options) -> Result<Vec<(String, Options)>, Error> {
    let text = read_text(path, "nodes").map_err(Error::Url)?;
    let file: File = toml::from_str(&text).map_err(|error| {
        Error::Url(format!(
            "the file of nodes {} is invalid: {}; write a [[node]] with a url for each node",
            path.display(),
            error.to_string().trim_end()
        ))
    })?;
    let folder = path.parent().unwrap_or(Path::new(""));
    file.node.into_iter().map(|entry| with_files(entry, folder, options)).collect()
}

/// Returns the node's url, and `options` with what the node's own files hold. Their paths are relative to `folder`.
///
/// # Errors
/// A file cannot be read, or holds no token.
pub(super) fn with_files(entry: Entry, folder: &Path, options: &Options) -> Result<(String, Options), Error> {
    let mut options = options.clone();
    if let Some(token) = entry.token_file {
        options.token = Some(read_token(&folder.join(token)).map_err(Error::Token)?);
    }
    if let Some(certificates) = entry.tls_ca {
        let text = read_text(&folder.join(certificates), "certificates");
        options.tls_ca = Some(text.map_err(Error::Trust)?);
    }
    Ok((entry.url, options))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn urls(pool: &str) -> Result<Vec<String>, String> {
        let parsed = parse(pool, &Options::default()).map_err(|error| error.to_string())?;
        Ok(parsed.into_iter().map(|(url, _)| url).collect())
    }

    #[test]
    fn a_list_is_split_at_commas_and_joined_again() {
        for pool in ["shm:/a", "shm:/a,tcp://b:1", "ring:/with%2Ccomma,udp://c"] {
            let found = urls(pool).expect("a valid list");
            assert_eq!(found.len(), pool.split(',').count());
            assert_eq!(join(found.iter().map(String::as_str)), pool);
        }
        assert_eq!(urls("shm:/a%2Cb").expect("one node"), ["shm:/a,b"]);
        assert_eq!(join(["shm:/a,b"].into_iter()), "shm:/a%2Cb");
    }

    #[test]
    fn an_invalid_list_is_refused_with_a_remedy() {
        let many = vec!["shm:/a"; NODES_MAX + 1].join(",");
        for (pool, reason) in [
            ("shm:/a,", "has an empty url"),
            (",", "has an empty url"),
            ("shm:/a,tcp://b,shm:/a", "names 'shm:/a' twice"),
            ("local:,shm:/a", "has a 'local:' node among others"),
            (&many, "a pool has at most 64"),
            ("@/nowhere/nodes.toml", "could not read"),
        ] {
            let error = urls(pool).expect_err(pool);
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn a_file_names_nodes_with_their_own_credentials() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).expect("a file");
            std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600))
                .expect("a mode");
            format!("@{}", path.display())
        };
        file("b.token", "secret-of-b\n");
        file("ca.pem", "a certificate\n");
        let pool = file(
            "nodes.toml",
            "[[node]]\nurl = \"shm:/a,b\"\n\
             [[node]]\nurl = \"tls://b\"\ntoken_file = \"b.token\"\ntls_ca = \"ca.pem\"\n",
        );
        let own = Options { token: Some("the client's".into()), ..Options::default() };
        let parsed = parse(&pool, &own).expect("a valid file");
        let [(a, of_a), (b, of_b)] = &parsed[..] else { panic!("two nodes") };
        assert_eq!((&a[..], &b[..]), ("shm:/a,b", "tls://b"));
        assert_eq!((of_a.token.as_deref(), of_a.tls_ca.as_deref()), (Some("the client's"), None));
        assert_eq!(
            (of_b.token.as_deref(), of_b.tls_ca.as_deref()),
            (Some("secret-of-b"), Some("a certificate\n"))
        );

        for (text, reason) in [
            ("", "missing field `node`"),
            ("node = []", "names no node"),
            ("[[node]]\nurl = \"shm:/a\"\ntoken = \"x\"", "unknown field `token`"),
            ("[[node]]\nurl = \"shm:/a\"\ntoken_file = \"absent\"", "absent"),
        ] {
            let error = urls(&file("bad.toml", text)).expect_err(text);
            assert!(error.contains(reason), "{error}");
        }
    }
}
