//! The command line.

use std::path::PathBuf;
use std::str::FromStr;

use serde_json::Value;

use crate::case::{Activation, Case};
use crate::progress::Show;

/// What `--help` prints.
pub const USAGE: &str = "\
Trains a network on hand-written digits, its layers spread over the ranks.

usage: digits [OPTION VALUE]...
  --epochs N          passes over the training rows (20)
  --batch N           rows in a batch (16)
  --seed N            seed of the first weights (7)
  --widths A,B,..     lengths of the layers (64,256,128,10)
  --activation NAME   relu, tanh or sigmoid (relu)
  --optimizer NAME    torch's name of the optimizer (SGD)
  --device NAME       where parameters and their updates are: cpu, or cuda in a build with that feature (cpu)
  --options JSON      its options ({\"lr\": 0.1, \"momentum\": 0.8} for SGD, else the defaults)
  --curves DIR        where the curves are written (out/digits)
  --out FILE          losses, accuracies, owners and traffic as JSON
  --progress HOW      bar, lines, nothing, or auto: a bar on a terminal, else lines (auto; nothing with --case)
  --case FILE         trains a case of this file instead, and compares with its history
  --index K           which case (0)
";

/// What the command line asks for.
#[derive(Debug)]
pub struct Options {
    /// Trains this case of this file instead of a network of its own.
    pub case: Option<(PathBuf, usize)>,
    /// Where the numbers go.
    pub out: Option<PathBuf>,
    /// Where the curves go.
    pub curves: PathBuf,
    /// How progress is shown; left to what is trained if not given.
    pub progress: Option<Show>,
    /// Whether parameters live on the GPUs of their owners.
    pub cuda: bool,
    /// Seed of the first values.
    pub seed: u64,
    /// The network to train when no case is given; still without first values.
    pub network: Case,
}

impl Options {
    /// Reads the arguments that follow the program's name; `None` if they ask for help.
    pub fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Option<Self>, String> {
        let (mut file, mut index, mut options) = (None, None, None);
        let network = Case {
            widths: vec![64, 256, 128, 10],
            activation: Activation::Relu,
            optimizer: "SGD".into(),
            options: Value::Null,
            epochs: 20,
            batch: 16,
            init: vec![],
            history: vec![],
        };
        let mut parsed = Self {
            case: None,
            out: None,
            curves: "out/digits".into(),
            progress: None,
            cuda: false,
            seed: 7,
            network,
        };
        while let Some(argument) = arguments.next() {
            if argument == "--help" || argument == "-h" {
                return Ok(None);
            }
            let (name, value) = match argument.split_once('=') {
                Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                None => (argument, None),
            };
            let mut value = || {
                value
                    .clone()
                    .or_else(|| arguments.next())
                    .ok_or_else(|| format!("{name} needs a value"))
            };
            let network = &mut parsed.network;
            match name.as_str() {
                "--case" => file = Some(value()?.into()),
                "--index" => index = Some(number(&name, &value()?)?),
                "--out" => parsed.out = Some(value()?.into()),
                "--curves" => parsed.curves = value()?.into(),
                "--progress" => {
                    let value = value()?;
                    parsed.progress = Some(
                        value
                            .parse()
                            .map_err(|()| format!("--progress: `{value}` is not bar, lines, nothing or auto"))?,
                    );
                }
                "--device" => {
                    parsed.cuda = match value()?.as_str() {
                        "cpu" => false,
                        "cuda" => true,
                        other => return Err(format!("--device: `{other}` is not cpu or cuda")),
                    }
                }
                "--seed" => parsed.seed = number(&name, &value()?)?,
                "--epochs" => network.epochs = number(&name, &value()?)?,
                "--batch" => network.batch = number(&name, &value()?)?,
                "--widths" => network.widths = value()?.split(',').map(|x| number(&name, x)).collect::<Result<_, _>>()?,
                "--activation" => {
                    network.activation = serde_json::from_value(value()?.into()).map_err(|e| format!("--activation: {e}"))?;
                }
                "--optimizer" => network.optimizer = value()?,
                "--options" => options = Some(serde_json::from_str(&value()?).map_err(|e| format!("--options: {e}"))?),
                other => return Err(format!("unknown option {other}")),
            }
        }
        parsed.case = match (file, index) {
            (Some(file), index) => Some((file, index.unwrap_or(0))),
            (None, Some(_)) => return Err("--index needs --case".into()),
            (None, None) => None,
        };
        parsed.network.options = match options {
            Some(options) => options,
            None if parsed.network.optimizer == "SGD" => serde_json::json!({"lr": 0.1, "momentum": 0.8}),
            None => Value::Null,
        };
        Ok(Some(parsed))
    }
}

fn number<T: FromStr>(name: &str, text: &str) -> Result<T, String> {
    text.trim()
        .parse()
        .map_err(|_| format!("{name}: `{text}` is not a number that fits"))
}
