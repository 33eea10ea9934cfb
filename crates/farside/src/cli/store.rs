//! `store`: creates, lists, rebuilds and drops stores.

mod threshold;

use super::info::each_node;
use super::{Done, Failure, Target, human_bytes, value_size};
use farside::NewStore;
use farside::parts::block_store;
use farside_systems::blocks::stripe::Shape as Blocks;
use farside_systems::index::smart::INLINE_MAX;
use farside_systems::index::{Described, Indexing, Keys, STRING_MAX, described};
use farside_systems::kv::chequer::layout::BLOCK_BUCKETS_MAX;
use farside_systems::registry::{default_kv, named, names, shape_of};
use farside_systems::system::{Family, Shape, Sizing, SizingError};
use farside_systems::txn::farm::layout::BACKUPS_MAX;
use farside_systems::txn::{Prepare, Transacting};
use std::time::Duration;
use threshold::Threshold;

/// Create, list, rebuild and drop stores.
#[derive(clap::Args)]
pub(super) struct Store {
    #[command(flatten)]
    target: Target,
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Create a store
    Create {
        /// Name of the store: 1 to 64 letters, digits, '-', '_' or '.'
        name: String,
        /// Bytes for its table and items together: a multiple of 1MiB
        #[arg(long, value_name = "BYTES", default_value = "64MiB", value_parser = super::quota)]
        quota: u64,
        /// Number of items for which its table is sized [default: derived from the quota]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
        items: Option<u64>,
        #[arg(long, default_value = default_kv().kind, help = help_of_kind())]
        kind: String,
        /// Give each 8-byte key its own slot (the paper's collision-free layout)
        #[arg(long)]
        collision_free: bool,
        /// Buckets that a client reads at once: 1, 2, 4, ... 64; only for the kinds chequer and chequer-message
        /// [default: 4]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=BLOCK_BUCKETS_MAX))]
        block_buckets: Option<u64>,
        /// Length of a value from which clients write it themselves; auto: measure where that becomes faster; only for
        /// the kinds chequer and chequer-message [default: 1KiB]
        #[arg(long, value_name = "BYTES|auto", value_parser = threshold::parsed)]
        put_threshold: Option<Threshold>,
        /// Keys of an index: 8, for numbers of 8 bytes, or string, for strings of 1 to 128 bytes; only for the kinds
        /// smart, art and sherman [default: 8]
        #[arg(long, value_name = "8|string", value_parser = key_size)]
        key_size: Option<Keys>,
        /// Length of the longest value; only for the kinds smart, art, sherman [default: 8], prism-tx, farm, fasst
        /// [default: 1KiB], farm-kv and cached-index [default: 256 with its key]
        #[arg(long, value_name = "BYTES", value_parser = value_size)]
        value_size: Option<u32>,
        /// Length of the longest value that an index keeps beside its key: at most 7KiB, for which each key then has
        /// room; longer ones cost a request more; only for the kinds smart and art [default: --value-size, or 256 if
        /// that is above 7KiB]
        #[arg(long, value_name = "BYTES", value_parser = value_size)]
        inline_size: Option<u32>,
        /// Rounds in which a transaction is validated: together (one), or paper (all reads, then all writes); only for
        /// the kind prism-tx [default: together]
        #[arg(long, value_enum)]
        prepare: Option<PrepareArg>,
        /// Largest error of the clients' clocks, such as 5ms: commits wait until their timestamps have passed on every
        /// clock, so that transactions are strictly serializable; only for the kind prism-tx [default: commits do not
        /// wait]
        #[arg(long, value_name = "TIME", value_parser = clock_error)]
        clock_error: Option<Duration>,
        /// Number of other nodes that have a copy of each key and of what transactions commit: 0 to 4; only for the
        /// kinds farm and fasst [default: 0]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(..=i64::from(BACKUPS_MAX)))]
        backups: Option<u8>,
        /// Number of nodes that hold a part of the store each; the name determines which [default: all]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        members: Option<u32>,
    },
    /// List the stores
    List {
        /// Print one JSON object a line
        #[arg(long)]
        json: bool,
    },
    /// Replace the table of a store by a new one without deleted keys, while clients use the store
    Rebuild {
        /// Name of the store
        name: String,
        /// Number of items for which the new table is sized [default: the items in the store]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
        items: Option<u64>,
    },
    /// Drop a store with all of its content
    Drop {
        /// Name of the store
        name: String,
        /// Drop the rest of a store whose first node is gone for good, and does not answer or is not in the pool
        #[arg(long)]
        forget: bool,
    },
}

/// Rounds in which a transaction is validated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum PrepareArg {
    /// One: the checks of all reads and writes of a node together
    Together,
    /// Two, as in the paper: all reads, then all writes
    Paper,
}

fn help_of_kind() -> String {
    format!(
        "System of the store: {}; {}: keys in order, for 'farside index'; {}: transactions, for 'farside txn'; or raw: \
         plain memory for 'farside perf'",
        names(Family::Kv),
        names(Family::Index),
        names(Family::Txn)
    )
}

/// Parses, for clap, the largest error of a clock.
fn clock_error(text: &str) -> Result<Duration, String> {
    let error = super::duration(text)?;
    match error <= Duration::from_secs(1) && error >= Duration::from_micros(1) {
        true => Ok(error),
        false => Err(format!("'{text}' is not an error of clocks: give 1us to 1s, such as 5ms")),
    }
}

/// Parses, for clap, the length of an index's keys.
fn key_size(text: &str) -> Result<Keys, String> {
    match text {
        "8" => Ok(Keys::Numbers),
        "string" => Ok(Keys::Strings),
        _ => Err(format!(
            "'{text}' is not a length of keys: give 8, for numbers of 8 bytes, or string, for strings of 1 to \
             {STRING_MAX} bytes"
        )),
    }
}

impl Store {
    pub(super) fn run(self) -> Done {
        let pool = self.target.connect()?;
        match self.action {
            Action::Create {
                name,
                quota,
                items,
                kind,
                collision_free,
                block_buckets,
                put_threshold,
                key_size,
                value_size,
                inline_size,
                prepare,
                clock_error,
                backups,
                members,
            } => {
                let prepare = prepare.map(|prepare| match prepare {
                    PrepareArg::Together => Prepare::Together,
                    PrepareArg::Paper => Prepare::Paper,
                });
                let members = members.map(|members| members as usize);
                let mut new = NewStore {
                    kind,
                    items,
                    collision_free,
                    block_buckets,
                    keys: key_size,
                    value_size,
                    inline_size,
                    transacting: Transacting { prepare, clock_error, backups, ..Transacting::NONE },
                    members,
                    ..NewStore::prism_kv(name, quota)
                };
                refuse_options(&new, put_threshold.is_some())?;
                refuse_backups(&new, pool.nodes().len())?;
                new.put_threshold = match put_threshold {
                    Some(Threshold::Auto) => Some(threshold::measure(&pool, &new)?),
                    Some(Threshold::Bytes(bytes)) => Some(bytes),
                    None => None,
                };
                let store = pool.create_store(&new)?;
                match &store.membership {
                    None => print_line!("store '{}' has {}", store.name, human_bytes(store.quota)),
                    Some(of) => print_line!(
                        "store '{}' has {} on each of {} nodes",
                        store.name,
                        human_bytes(store.quota),
                        of.members.len()
                    ),
                }
            }
            Action::List { json } => list(&pool, json)?,
            Action::Rebuild { name, items } => {
                pool.rebuild_store(&name, items)?;
                for member in pool.members(&name)? {
                    let store = rebuilt(&member, &name)?;
                    print_line!("store '{name}' has {}", table_of(&store));
                }
            }
            Action::Drop { name, forget } => {
                refuse_volume(&pool, &name)?;
                let untold = match forget {
                    true => pool.forget_store(&name)?,
                    false => pool.drop_store(&name)?,
                };
                print_line!("store '{name}' is dropped");
                for url in untold {
                    note!(
                        "farside: {url} did not answer: it frees its part when a store '{name}' is next opened, \
                         created or dropped"
                    );
                }
            }
        }
        Ok(())
    }
}

/// # Errors
/// The kind of the store does not have an option that was given.
fn refuse_options(new: &NewStore, has_threshold: bool) -> Done {
    let Some(system) = named(&new.kind) else { return Ok(()) };
    let plain = Sizing::default();
    let lacks = |sizing| (system.parameters)(&sizing) == (system.parameters)(&plain);
    let buckets = Sizing { block_buckets: Some(1), ..plain };
    let threshold = Sizing { put_threshold: Some(1), ..plain };
    let value = Sizing { value_len: 1, ..plain };
    let inline = Sizing { indexing: Indexing { inline_max: Some(1), ..Indexing::NONE }, ..plain };
    let transacting = Transacting { prepare: Some(Prepare::Paper), ..Transacting::NONE };
    let prepare = Sizing { transacting, ..plain };
    let transacting = Transacting { clock_error: Some(Duration::from_micros(1)), ..Transacting::NONE };
    let clock_error = Sizing { transacting, ..plain };
    let transacting = Transacting { backups: Some(0), ..Transacting::NONE };
    let backups = Sizing { transacting, ..plain };
    let is_index = system.family == Family::Index;
    let is_txn = system.family == Family::Txn;
    let refused = [
        ("--block-buckets", new.block_buckets.is_some() && lacks(buckets)),
        ("--put-threshold", has_threshold && lacks(threshold)),
        ("--key-size", new.keys.is_some() && !is_index),
        ("--value-size", new.value_size.is_some() && !is_index && !is_txn && lacks(value)),
        ("--inline-size", new.inline_size.is_some() && lacks(inline)),
        ("--prepare", new.transacting.prepare.is_some() && lacks(prepare)),
        ("--clock-error", new.transacting.clock_error.is_some() && lacks(clock_error)),
        ("--backups", new.transacting.backups.is_some() && lacks(backups)),
        ("--items", new.items.is_some() && is_index),
        ("--collision-free", new.collision_free && is_index),
    ];
    if let Some((option, _)) = refused.into_iter().find(|(_, is_refused)| *is_refused) {
        return Err(Failure::Error(format!(
            "{} stores have no {option}: leave it out, or give another --kind",
            new.kind
        )));
    }
    if let Some(bytes) = new.inline_size.filter(|bytes| *bytes > INLINE_MAX) {
        return Err(Failure::Error(format!(
            "{} stores have at most {INLINE_MAX} bytes of a value beside its key, and not {bytes}: give a smaller \
             --inline-size",
            new.kind
        )));
    }
    match (system.footprint)(&new.sizing()) {
        Err(SizingError::Value(max)) => Err(Failure::Error(format!(
            "values of {} stores have at most {max} bytes: give a smaller --value-size",
            new.kind
        ))),
        _ => Ok(()),
    }
}

/// # Errors
/// The store has too few nodes for its backups, each of which is on another node than its key.
fn refuse_backups(new: &NewStore, nodes: usize) -> Done {
    let (backups, members) =
        (usize::from(new.transacting.backups.unwrap_or(0)), new.members.unwrap_or(nodes));
    match backups < members.max(1) {
        true => Ok(()),
        false => Err(Failure::Error(format!(
            "a store with {backups} backups of each key needs {} nodes, and this one has {members}: give fewer \
             --backups, or more nodes",
            backups + 1
        ))),
    }
}

/// # Errors
/// The store belongs to a volume that is striped over several stores. To drop one of them would leave the others.
fn refuse_volume(pool: &farside::Pool, name: &str) -> Done {
    // If no node answers, the drop itself says why.
    let store = pool.stores().ok().and_then(|stores| stores.into_iter().find(|store| store.name == name));
    let Some(store) = store else { return Ok(()) };
    let Some(stripe) = block_store(&store).and_then(|shape| shape.stripe) else { return Ok(()) };
    let volume = stripe.volume_name(&store.name).unwrap_or(&store.name);
    Err(Failure::Error(format!(
        "store '{name}' is one of {} stores of volume '{volume}': drop the volume with 'farside volume drop {volume}'",
        stripe.count
    )))
}

/// Waits until a node has rebuilt the table of a store, and returns the store's entry.
fn rebuilt(node: &farside::Pool, name: &str) -> Result<farside::Store, Failure> {
    loop {
        let store = node.stores()?.into_iter().find(|store| store.name == name);
        let store = store.ok_or_else(|| Failure::Error(format!("store '{name}' was dropped meanwhile")))?;
        if store.former.is_none() {
            return Ok(store);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Prints one line for each store of a node: a JSON object if `json`, else text.
pub(super) fn list(pool: &farside::Pool, json: bool) -> Done {
    each_node(pool, json, |node, place| {
        for store in node.stores()? {
            if json {
                let mut object = place.json();
                object.extend(store_json(&store).as_object().cloned().unwrap_or_default());
                print_line!("{}", serde_json::Value::Object(object));
            } else {
                let table = table_of(&store);
                let line = format!("{}\t{}\t{}\t{table}", store.name, store.kind, human_bytes(store.quota));
                match &store.membership {
                    None => print_line!("{}", line.trim_end()),
                    Some(of) => print_line!("{line}\tmember {} of {}", of.index, of.members.len()),
                }
            }
        }
        Ok(())
    })
}

/// Interval at which the progress of a rebuild is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Describes a store's table in words: the progress of its rebuild if one is running, the blocks of a block store, or
/// the keys of an index.
pub(super) fn table_of(store: &farside::Store) -> String {
    if let Some(Blocks { block, blocks, stripe }) = block_store(store) {
        let size = format!("{blocks} blocks of {}", human_bytes(block.into()));
        return match stripe {
            None => format!("volume of {size}"),
            Some(stripe) => {
                let volume = stripe.volume_name(&store.name).unwrap_or(&store.name);
                format!("part {} of {} of volume {volume}, {size}", stripe.index, stripe.count)
            }
        };
    }
    if let Some(Described { keys, value_max }) = described(store) {
        let keys = match keys {
            Keys::Numbers => "numbers",
            Keys::Strings => "strings",
        };
        return format!("keys are {keys}, values up to {}", human_bytes(value_max.into()));
    }
    let Some(Shape { slots, epoch, .. }) = shape_of(store) else { return String::new() };
    let moved =
        store.former.as_ref().map(|former| format!(", {} % moved from the former", former.moved_percent));
    format!("table {epoch}, of {slots} slots{}", moved.unwrap_or_default())
}

/// Describes a store as a JSON object. Omits the store's key, its addresses and the seed of its hash function.
pub(super) fn store_json(store: &farside::Store) -> serde_json::Value {
    let mut parameters = serde_json::from_str(&store.parameters).unwrap_or(serde_json::Value::Null);
    if let Some(parameters) = parameters.as_object_mut() {
        parameters.remove("seed");
    }
    let mut object = serde_json::json!({
        "name": store.name,
        "kind": store.kind,
        "quota_bytes": store.quota,
        "table_bytes": store.table_len,
        "parameters": parameters,
        "moved_percent": store.former.as_ref().map(|former| former.moved_percent),
    });
    if let Some(of) = &store.membership {
        object["member"] = of.index.into();
        object["members"] = of.members.len().into();
        object["state"] = serde_json::to_value(of.state).expect("plain data");
    }
    object
}
