//! `info`: shows a node, or the settings of this program and their origins.

use super::store::store_json;
use super::{Done, Failure, StoreTarget, human_bytes, written};
use farside::config::{ADMIN_ADDRESS, DATA_PORT, Setting, Settings, usual_socket};
use farside::{NodeInfo, Pool, Store};
use std::io::Write;

/// Show a node, or the settings of this program and their origins.
#[derive(clap::Args)]
pub(super) struct Info {
    #[command(flatten)]
    target: StoreTarget,
    /// Show every setting and its origin, instead of the node
    #[arg(long)]
    config: bool,
    /// Output format of --config
    #[arg(long, value_enum, value_name = "FORMAT", requires = "config", conflicts_with = "json")]
    format: Option<Format>,
    /// List the RDMA devices of this machine, instead of the node
    #[cfg(feature = "verbs")]
    #[arg(long, conflicts_with_all = ["config", "pool", "store"])]
    devices: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// One line for each setting
    Text,
    /// One JSON object, as with --json
    Json,
    /// A settings file that yields the same settings, with their origins as comments
    Toml,
}

impl Info {
    pub(super) fn run(self) -> Done {
        if self.config {
            return self.show_settings();
        }
        #[cfg(feature = "verbs")]
        if self.devices {
            return super::devices::print(self.json);
        }
        let (pool, _) = self.target.connect()?;
        about(&pool, self.json)
    }

    fn show_settings(&self) -> Done {
        let settings = self.target.settings()?;
        match self.format {
            Some(Format::Toml) => return written(std::io::stdout().write_all(as_file(&settings).as_bytes())),
            Some(Format::Text) => {}
            Some(Format::Json) => return print_json(&settings),
            None if self.json => return print_json(&settings),
            None => {}
        }
        for (name, setting) in all(&settings) {
            print_line!("{name:<14}{}  ({})", setting.value, setting.origin);
        }
        Ok(())
    }
}

/// Returns the name and the value of each setting that a settings file can hold. The value is `None` if it is not set.
fn settable(settings: &Settings) -> [(&'static str, Option<&Setting>); 4] {
    [
        ("pool", Some(&settings.pool)),
        ("store", Some(&settings.store)),
        ("token_file", settings.token_file.as_ref()),
        ("tls_ca", settings.tls_ca.as_ref()),
    ]
}

/// Returns the name and the value of each setting, including the built-in ones and those that no settings file can
/// hold.
fn all(settings: &Settings) -> Vec<(&'static str, Setting)> {
    let built_in = |value: String| Setting { value, origin: "built in".into() };
    let set = settable(settings).into_iter();
    let mut all: Vec<_> = set
        .map(|(name, setting)| (name, setting.cloned().unwrap_or_else(|| built_in("none".into()))))
        .collect();
    let insecure_udp = match settings.insecure_udp {
        true => Setting { value: "true".into(), origin: "flag".into() },
        false => built_in("false".into()),
    };
    let file = settings.file.as_ref().map_or_else(
        || built_in("none".into()),
        |place| Setting {
            value: place.path.display().to_string(),
            origin: format!("{}, {}", place.origin, if place.is_there { "read" } else { "missing" }),
        },
    );
    all.extend([
        ("insecure_udp", insecure_udp),
        ("config", file),
        ("socket", usual_socket()),
        ("data_port", built_in(DATA_PORT.to_string())),
        ("admin", built_in(ADMIN_ADDRESS.into())),
    ]);
    all
}

fn print_json(settings: &Settings) -> Done {
    let fields = all(settings).into_iter().map(|(name, setting)| {
        (name.to_owned(), serde_json::json!({ "value": typed(name, &setting), "origin": setting.origin }))
    });
    print_line!("{}", serde_json::Value::Object(fields.collect()));
    Ok(())
}

/// Converts a setting's value to JSON: a number, a boolean, a string, or null if it is not set.
fn typed(name: &str, setting: &Setting) -> serde_json::Value {
    match (name, setting.value.as_str(), setting.origin.as_str()) {
        ("data_port" | "insecure_udp", value, _) => {
            value.parse().expect("formatted from a number or a boolean")
        }
        (_, "none", "built in") => serde_json::Value::Null,
        (_, value, _) => value.into(),
    }
}

/// Formats the settings as a settings file. Comments hold the origins and the names of settings that are not set.
fn as_file(settings: &Settings) -> String {
    let mut file = String::from("# Settings of farside, as they are in force.\n");
    for (name, setting) in settable(settings) {
        file += &match setting {
            Some(Setting { value, origin }) => {
                // The origin is escaped: it may be a path with a line feed, which would end the comment.
                format!("{name} = {}  # {}\n", toml::Value::from(value.as_str()), origin.escape_debug())
            }
            None => format!("# {name} is not set\n"),
        };
    }
    file
}

/// Prints the state and the stores of each node of the pool.
pub(super) fn about(pool: &Pool, json: bool) -> Done {
    each_node(pool, json, |node, place| {
        let (info, stores) = (node.info()?, node.stores()?);
        if json {
            let mut object = place.json();
            object.extend(serde_json::to_value(&info)?.as_object().cloned().unwrap_or_default());
            object.insert("stores".into(), stores.iter().map(store_json).collect());
            print_line!("{}", serde_json::Value::Object(object));
            return Ok(());
        }
        print_node(info, stores)
    })
}

/// Place of a node in its pool.
pub(super) struct NodePlace<'a> {
    number: usize,
    url: &'a str,
    /// Whether the pool has this node only.
    is_alone: bool,
}

impl NodePlace<'_> {
    /// Fields that identify the node in JSON output; none if the pool has one node.
    pub(super) fn json(&self) -> serde_json::Map<String, serde_json::Value> {
        match self.is_alone {
            true => serde_json::Map::new(),
            false => {
                [("node".into(), self.number.into()), ("url".into(), self.url.into())].into_iter().collect()
            }
        }
    }
}

/// Calls `print` for each node of the pool, with a heading if there are several. A node of several that does not
/// answer, or refuses, is reported in its place with the reason, and the other nodes follow.
///
/// # Errors
/// Those of `print`; of several nodes, `print` failed for one or more.
pub(super) fn each_node(
    pool: &Pool,
    json: bool,
    mut print: impl FnMut(&Pool, &NodePlace<'_>) -> Done,
) -> Done {
    let nodes = pool.nodes();
    let (count, is_alone, mut failed) = (nodes.len(), nodes.len() == 1, 0);
    for (number, node) in nodes.enumerate() {
        let place = NodePlace { number, url: node.url(), is_alone };
        if !is_alone && !json {
            print_line!("node {number} at {}", node.url());
        }
        match print(&node, &place) {
            Err(Failure::Error(reason)) if !is_alone => {
                failed += 1;
                if json {
                    let mut object = place.json();
                    object.insert("error".into(), reason.into());
                    print_line!("{}", serde_json::Value::Object(object));
                } else {
                    print_line!("error: {reason}");
                }
            }
            outcome => outcome?,
        }
        if !is_alone && !json && number + 1 < count {
            print_line!();
        }
    }
    match failed {
        0 => Ok(()),
        failed => Err(Failure::Error(format!(
            "{failed} of {count} nodes did not answer, or refused: the reasons are above; 'farside doctor --pool URL' \
             finds the step that fails"
        ))),
    }
}

fn print_node(info: NodeInfo, stores: Vec<Store>) -> Done {
    let longest = stores.iter().map(|store| "store ".len() + store.name.len()).max().unwrap_or(0);
    let width = (longest + 2).max(22);
    let rows = [
        ("release", info.version),
        ("process", if info.pid == 0 { "reported to admins only".into() } else { info.pid.to_string() }),
        ("memory", human_bytes(info.memory_bytes)),
        ("unassigned", human_bytes(info.unassigned_bytes)),
        ("pages", human_bytes(info.page_size)),
        ("sessions", info.sessions.to_string()),
        ("buffers reclaimed", info.reclaimed_buffers.to_string()),
        ("leaked buffers found", info.scanned_buffers.to_string()),
    ];
    for (name, value) in rows {
        print_line!("{name:<width$}{value}");
    }
    let refused = [
        ("unknown tokens", info.refusals.bad_tokens),
        ("greetings locked out", info.refusals.locked_out),
        ("wrong secrets", info.refusals.bad_secrets),
        ("wrong keys", info.refusals.wrong_keys),
        ("chains refused", info.refusals.chains),
        ("requests refused", info.refusals.asks),
        ("packets forged", info.refusals.forged),
        ("packets replayed", info.refusals.replayed),
    ];
    for (name, count) in refused.into_iter().filter(|&(_, count)| count > 0) {
        print_line!("{name:<width$}{count}");
    }
    for store in stores {
        let name = format!("store {}", store.name);
        print_line!("{name:<width$}{}, {}", store.kind, human_bytes(store.quota));
    }
    Ok(())
}
